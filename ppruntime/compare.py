"""Do two runs have the same losses, bit for bit?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ppruntime.metrics import read_metrics


@dataclass(frozen=True, slots=True)
class Comparison:
    """`num_steps` that both runs have; `first_difference` says where and what, None if nowhere."""

    num_steps: int
    first_difference: str | None

    @property
    def equal(self) -> bool:
        """Whether the runs have the same steps, at least one, and differ in none."""
        return self.num_steps > 0 and self.first_difference is None


def compare_metrics(metrics: Path, other_metrics: Path) -> Comparison:
    """Compares the losses and gradient norms of every step in two metrics.jsonl files. Floats are
    written there so that they read back as the same floats."""
    steps = {line.step: line for line in read_metrics(metrics)}
    other_steps = {line.step: line for line in read_metrics(other_metrics)}
    shared = sorted(steps.keys() & other_steps.keys())
    for step in sorted(steps.keys() ^ other_steps.keys()):
        return Comparison(len(shared), f"step {step} is in one run only")
    for step in shared:
        for name in ("loss", "grad_norm", "val_loss"):
            value, other = getattr(steps[step], name), getattr(other_steps[step], name)
            if value != other:
                return Comparison(len(shared), f"step {step} has {name} {value!r} and {other!r}")
    return Comparison(len(shared), None)
