"""What launchers set before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ppruntime.launch import cuda_environment

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF")


def test_only_what_the_user_left_out_is_set(monkeypatch):
    for name in (*NAMES, "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert set(cuda_environment.left_out()) == set(NAMES)
    assert "CUDA_MODULE_LOADING" not in cuda_environment.left_out(loads_kernels_at_once=False)
    for name in NAMES:
        with monkeypatch.context() as patched:
            patched.setenv(name, "mine")
            assert set(cuda_environment.left_out()) == set(NAMES) - {name}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "mine")  # its older name
    assert set(cuda_environment.left_out()) == set(NAMES[:2])


def test_kernels_are_loaded_at_once_if_any_hop_waits_by_a_kernel(monkeypatch):
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    for names, at_once in (
        (("put",), False),
        (("copy_engine", "put"), False),
        (("copy_engine", "nccl"), True),
        (("auto",), True),
    ):
        assert ("CUDA_MODULE_LOADING" in cuda_environment.left_out_for(names)) == at_once, names


def test_it_comes_before_torch():
    """A launcher that loaded torch first would set the allocator's ways in vain."""
    text = (
        "import sys; from ppruntime.launch import cuda_environment; print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-c", text], cwd=root, capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "False"
