"""`ppruntime bench kernels`: the same training with the readable references and with kernels.

One process a run, four layers at full width (window, both ratios, reuse, an Engram), on the Python
library's text: the references, every kernel in bf16, also FP8 products, and the references once
more from other weights and data. What the last run differs by is the noise that the others'
difference is held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

import torch

from ppruntime.config.help import kernels_left_to_auto
from ppruntime.launch.bench_training import trained
from ppruntime.launch.records import write_record

CONFIG = Path(__file__).resolve().parent / "configs" / "v41-proxy-8.toml"
FOUR_LAYERS = (
    "model.num_layers=4",
    "model.compress_ratios=[0,2,1,1]",
    "model.kv_sources=[1,2]",
    "model.index_sources=[1,2]",
    "model.candidate_source=2",
    "model.engram_layers=[1]",
    "model.num_experts=8",
    "pp.size=1",
    "train.force_balanced_routing=false",
    "train.num_micro_batches=1",
    "train.seq_len=2048",
    "data.type=stdlib",
    "optim.warmup_steps=20",
    "ac.mode=none",
    "run.tensorboard=false",
    "run.log_interval=1000",
)
KERNELS = kernels_left_to_auto(but=("linear",))
FP8 = ("kernels.linear=auto", "moe.compute.backend=triton")
RUNS: dict[str, tuple[str, ...]] = {
    "reference": ("kernels.head=chunked",),
    "kernels": KERNELS,
    "kernels, FP8": (*KERNELS, *FP8),
    "reference, other seed": ("kernels.head=chunked", "train.seed=2"),
}
"""Name -> overrides. The first is what the others are compared with, the last says how much by."""
WINDOW = 20
"""Steps whose mean loss is one point of a curve."""


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    name: str
    overrides: tuple[str, ...]
    losses: tuple[float, ...]
    """Of every step."""
    step_ms: float
    """Median, on the host's clock."""


def curve(losses: Sequence[float]) -> list[float]:
    """Means of `WINDOW` steps after one another; a rest shorter than that is left out."""
    starts = range(0, len(losses) - WINDOW + 1, WINDOW)
    return [fmean(losses[start : start + WINDOW]) for start in starts]


def apart(run: Learned, other: Learned) -> float:
    """The largest distance of the two curves from the second point on: before, both fall."""
    pairs = zip(curve(run.losses), curve(other.losses), strict=True)
    return max([abs(a - b) for a, b in pairs][1:], default=0.0)


def run(*, steps: int, overrides: Sequence[str], config: Path, out: Path) -> int:
    """Trains, prints a line a run, and writes `out` after every one.

    Gives 1 if a run did not end well, or one with kernels in bf16 is farther from the reference
    than twice the noise.
    """
    found: list[Learned] = []
    command = " ".join(["ppruntime bench kernels", *overrides, f"--steps {steps}"])
    for name, own in RUNS.items():
        metrics = trained(config, [*overrides, *own, f"train.steps={steps}"])
        if metrics is None and FP8[0] in own:
            print(f"{name}: left out, see above", flush=True)
            continue
        if metrics is None:
            return 1
        losses = tuple(step.loss for step in metrics if step.loss is not None)
        times = [1e3 * step.step_seconds for step in metrics]
        found.append(Learned(name, own, losses, median(times)))
        distance = apart(found[-1], found[0])
        last = fmean(losses[-WINDOW:])
        print(
            f"{name:24}first {losses[0]:.4f}  last {WINDOW} {last:.4f}  curve apart by "
            f"{distance:.4f}  {found[-1].step_ms:.0f} ms a step",
            flush=True,
        )
        _write(out, command, [CONFIG.name, *overrides], found)
    noise = apart(found[-1], found[0])
    is_near = apart(found[1], found[0]) <= 2 * noise
    print(f"results in {out}; noise {noise:.4f}, kernels within twice of it: {is_near}")
    return int(not is_near)


def _write(out: Path, command: str, config: Sequence[str], found: Sequence[Learned]) -> None:
    record = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": str(torch.__version__)},
        "config": list(config),
        "window": WINDOW,
        "runs": [asdict(row) | {"apart": apart(row, found[0])} for row in found],
    }
    write_record(out, record)
