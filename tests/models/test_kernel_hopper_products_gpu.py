"""The Gluon kernels of the FP8 products where they run, in a process that may be ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_they_have_the_bits_of_tritons_however_they_are_launched():
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS.parent), str(TESTS)]))
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    found = subprocess.run(
        [sys.executable, str(TESTS / "hopper_products_on_gpu.py")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr[-2000:]
