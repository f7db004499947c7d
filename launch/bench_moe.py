"""Bench of the experts: `ppruntime bench moe --out FILE`, on one GPU or over several.

One GPU: every phase of one routed layer, forward and backward, at V4.1-Flash's widths and 49,152
routed rows over 48 experts, and in the shapes of 48 and 96 ranks with few experts and many rows
each, for each backend, beside bf16 `torch._grouped_mm` in the same run;
tries several tiles; compares results with fp64 of the same FP8 values. Kernels are compiled
beforehand by worker processes, so that the run itself is short.

`--ranks N`: whole layers over the GPUs of a host, see `bench_moe_ranks`. Writes JSON, also of a run
that broke off.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from ppruntime.launch.bench_moe_shapes import SHAPES, WORKERS, compile_share
from ppruntime.launch.records import end_in_order, run_python


def main() -> int:
    """The bench, or one worker's share of its kernels."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that the experts lie over")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=SHAPES, help="one GPU: those to run"
    )
    parser.add_argument("--compile", type=int, metavar="WORKER", help=argparse.SUPPRESS)
    arguments, more = parser.parse_known_args()
    if arguments.compile is not None:
        return compile_share(arguments.compile, arguments.shapes)
    if arguments.ranks > 1:
        return _over_ranks(arguments, more)
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    begin = time.monotonic()
    command = [sys.executable, "-m", "ppruntime.launch.bench_moe", "--out", str(arguments.out)]
    command += ["--shapes", *arguments.shapes]
    workers = [subprocess.Popen([*command, "--compile", str(worker)]) for worker in range(WORKERS)]
    codes = [worker.wait() for worker in workers]
    print(f"compiled in {time.monotonic() - begin:.0f} s, exit codes {codes}", flush=True)
    from ppruntime.launch.bench_moe_phases import ExpertPhases

    bench = ExpertPhases(arguments.repetitions)
    try:
        bench.run(arguments.shapes)
    finally:
        bench.write(arguments.out, time.monotonic() - begin)
    return int(any(bench.failed_checks))


def _over_ranks(arguments: argparse.Namespace, more: list[str]) -> int:
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    return run_python(
        [
            *torchrun,
            f"--nproc-per-node={arguments.ranks}",
            *("-m", "ppruntime.launch.bench_moe_ranks"),
            *("--ranks", str(arguments.ranks)),
            *("--out", str(arguments.out)),
            *("--repetitions", str(arguments.repetitions)),
            *more,
        ]
    )


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    end_in_order()
    sys.exit(main())
