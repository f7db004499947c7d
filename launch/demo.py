"""The demo: a tiny V4.1 on real text, as a 4-stage pipeline and in one process; do they agree?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ppruntime.compare import compare_metrics
from ppruntime.run_dir import new_run_dir

CONFIG = Path(__file__).resolve().parent / "configs" / "tiny.toml"


def main() -> int:
    """Plans, trains twice, compares. Exit code 0 only if every loss and norm is bitwise equal."""
    root = new_run_dir(Path("runs"), "demo")
    pipeline, one_process = root / "pipeline", root / "one-process"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], check=True, env=environment)

    python("-m", "ppruntime.launch.cli", "plan", str(CONFIG))
    print("\nFour stages in four processes:", flush=True)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    train = ("-m", "ppruntime.launch.train", str(CONFIG))
    python(*launcher, *train, f"run.dir={pipeline}")
    print("\nThe same model, data and steps in one process:", flush=True)
    python(*train, f"run.dir={one_process}", "pp.size=1", "pp.layers_per_stage=default")

    result = compare_metrics(pipeline / "metrics.jsonl", one_process / "metrics.jsonl")
    verdict = (
        f"bitwise equal to the single-process run in all {result.num_steps} steps"
        if result.equal
        else f"NOT equal to the single-process run: {result.first_difference}"
    )
    print(f"\nLosses and gradient norms of the pipeline are {verdict}.")
    for what, name in (
        ("metrics", "metrics.jsonl"),
        ("timeline picture", "timeline.svg"),
        ("timeline for Perfetto", "trace.json"),
        ("checkpoint", "ckpt"),
    ):
        print(f"{what:>22}  {pipeline / name}")
    return 0 if result.equal else 1


if __name__ == "__main__":
    sys.exit(main())
