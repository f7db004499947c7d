"""The demo: a tiny V4.1 on real text, as a 4-stage pipeline and in one process; do they agree?

`python -m ppruntime.launch.demo`; arguments are overrides of the configuration, such as
`train.steps=5`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppruntime.compare import compare_metrics
from ppruntime.metrics import read_metrics
from ppruntime.run_dir import new_run_dir

CONFIG = Path(__file__).resolve().parent / "configs" / "tiny.toml"
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
TRAIN = ("-m", "ppruntime.launch.train")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the two runs agree, and the sentence that says so."""

    equal: bool
    text: str


def main(overrides: Sequence[str] | None = None) -> int:
    """Plans, trains twice, compares. Exit code 0 only if every loss and norm is bitwise equal."""
    overrides = sys.argv[1:] if overrides is None else overrides
    config = (os.path.relpath(CONFIG), *overrides)
    root = new_run_dir(Path("runs"), "demo")
    pipeline, one_process = root / "pipeline", root / "one-process"
    alone = ("pp.size=1", "pp.layers_per_stage=default", "pp.schedule=1f1b")
    parts = (
        (
            "The plan: a tiny DeepSeek-V4.1, cut into 4 stages",
            ("-m", "ppruntime.launch.cli", "plan", *config),
        ),
        (
            "Run 1 of 2: 4 stages in 4 processes",
            (*LAUNCHER, *TRAIN, *config, f"run.dir={pipeline}"),
        ),
        (
            "Run 2 of 2: the same in one process",
            (*TRAIN, *config, f"run.dir={one_process}", *alone),
        ),
    )
    for title, command in parts:
        if not _run(title, command):
            return 1
    return report(pipeline, one_process)


def report(pipeline: Path, one_process: Path) -> int:
    """Prints the verdict on the two run directories and what the pipeline's holds. Exit code."""
    verdict = compare(pipeline / "metrics.jsonl", one_process / "metrics.jsonl")
    print(f"\n{verdict.text}\n")
    for what, name in (
        ("metrics", "metrics.jsonl"),
        ("timeline picture", "timeline.svg"),
        ("timeline for Perfetto", "trace.json"),
        ("checkpoint", "ckpt"),
    ):
        print(f"{what:>22}  {pipeline / name}")
    return 0 if verdict.equal else 1


def compare(metrics: Path, other_metrics: Path) -> Verdict:
    """Reads both runs' metrics.jsonl, the pipeline's first."""
    result = compare_metrics(metrics, other_metrics)
    if not result.equal:
        where = result.first_difference or "neither has a step"
        return Verdict(False, f"NOT EQUAL: pipeline and single-process run differ: {where}.")
    steps = read_metrics(metrics)
    return Verdict(
        True,
        f"EQUAL: all {result.num_steps} losses and gradient norms of the pipeline are bitwise those"
        f" of the single-process run; the loss went from {steps[0].loss:.3f} to"
        f" {steps[-1].loss:.3f}.",
    )


def _run(title: str, command: Sequence[str]) -> bool:
    """Runs a Python command under its title; whether it worked. Its output is shown as it comes."""
    # torchrun warns when it has to choose the number of threads itself.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    print(f"\n{title}\n$ python {shlex.join(command)}\n", flush=True)
    start = time.perf_counter()
    code = subprocess.run([sys.executable, *command], check=False, env=environment).returncode
    if code:
        print(f"\nThis failed with exit code {code}.", file=sys.stderr)
    else:
        print(f"({time.perf_counter() - start:.0f} s)", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
