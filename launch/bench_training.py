"""A training run as a part of a bench: in a process of its own, for its metrics alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppruntime.metrics import StepMetrics, read_metrics


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run left."""

    metrics: list[StepMetrics]
    """Of every step that was taken."""
    was_cut: bool
    """Whether it was ended before it was through."""


def trained(config: Path, overrides: Sequence[str]) -> list[StepMetrics] | None:
    """The metrics of every step; None, with what the run printed on stderr, if it failed."""
    found = trained_for(config, overrides, limit_seconds=None)
    return None if found is None else found.metrics


def trained_for(
    config: Path, overrides: Sequence[str], *, limit_seconds: float | None
) -> Trained | None:
    """The same, ended after `limit_seconds`; what it did until then is no failure. Killed: asked to
    end it would save a state that nobody wants, tens of gigabytes of it."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        arguments = [str(config), *overrides, f"run.dir={run_dir}"]
        with subprocess.Popen(
            [sys.executable, "-m", "ppruntime.launch.train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            was_cut = False
            try:
                said = process.communicate(timeout=limit_seconds)
            except subprocess.TimeoutExpired:
                was_cut = True
                process.kill()
                said = process.communicate()
            except BaseException:  # this process is told to end: the run, too
                process.kill()
                raise
        if process.returncode and not was_cut:
            print("".join(said), file=sys.stderr)
            return None
        metrics = run_dir / "metrics.jsonl"
        return Trained(list(read_metrics(metrics)) if metrics.exists() else [], was_cut)
