"""What a record says was run is what anyone can type."""

from __future__ import annotations

import pytest

from ppruntime.launch.command_line import command_line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "/home/me/out/parts.json"], "--out parts.json"),
        (["bench", "layers", "--only", "parts"], "--only parts"),
        (["docs/bench/x.json", "a=/data/b.bin"], "docs/bench/x.json a=b.bin"),
        (["--only", "deep_gemm + deep_ep"], "--only 'deep_gemm + deep_ep'"),
        (["--nccl-library=/tmp/libnccl.so.2"], "--nccl-library=libnccl.so.2"),
    ],
    ids=str,
)
def test_it_names_the_bench_and_no_folder_of_this_machine(arguments, said):
    assert command_line("layers", arguments) == f"ppruntime bench layers {said}"


def test_its_own_arguments_are_the_default(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/cli.py", "bench", "moe", "--ranks", "2"])
    assert command_line("moe") == "ppruntime bench moe --ranks 2"
