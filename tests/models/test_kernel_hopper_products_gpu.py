"""The Gluon kernels of the FP8 products where they run, in processes that may be ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
SHARES, LIMIT_SECONDS = 4, 150


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_they_have_the_bits_of_tritons_however_they_are_launched(tmp_path):
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    script, deadline = str(TESTS / "hopper_products_on_gpu.py"), time.monotonic() + LIMIT_SECONDS
    logs = [tmp_path / f"share-{share}.txt" for share in range(SHARES)]
    running = []
    try:
        for share, log in enumerate(logs):
            with log.open("w") as out:
                running.append(
                    subprocess.Popen(
                        [sys.executable, script, str(share), str(SHARES)],
                        env=environment, stdout=out, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
        for process, log in zip(running, logs, strict=True):
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"no end after {LIMIT_SECONDS} s: {log.read_text()[-2000:]}")
            assert process.returncode == 0, log.read_text()[-4000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
