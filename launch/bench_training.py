"""A training run as a part of a bench: in a process of its own, for its metrics alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ppruntime.metrics import StepMetrics, read_metrics


def trained(config: Path, overrides: Sequence[str]) -> list[StepMetrics] | None:
    """The metrics of every step; None, with what the run printed on stderr, if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        arguments = [str(config), *overrides, f"run.dir={run_dir}"]
        done = subprocess.run(
            [sys.executable, "-m", "ppruntime.launch.train", *arguments],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return None
        return list(read_metrics(run_dir / "metrics.jsonl"))
