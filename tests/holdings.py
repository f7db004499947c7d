"""What a process holds: two of these, some steps apart, show a leak."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Holdings:
    """Now."""

    num_tensors: int
    """Tensors that Python knows."""
    num_threads: int
    num_files: int
    host_bytes: int
    """Pages for what is offloaded."""
    resident_bytes: int


def holdings(host_bytes: int) -> Holdings:
    """This process's."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Holdings(
        num_tensors=sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
        num_threads=len(os.listdir("/proc/self/task")),
        num_files=len(os.listdir("/proc/self/fd")),
        host_bytes=host_bytes,
        resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
    )


def assert_no_more(early: Holdings, late: Holdings) -> None:
    """Of all that is counted one by one; resident memory also moves by itself."""
    for name in ("num_tensors", "num_threads", "num_files", "host_bytes"):
        assert getattr(late, name) <= getattr(early, name), (name, early, late)
