"""What CUDA and torch's allocator read from the environment when they start. No torch."""

from __future__ import annotations

import os
from collections.abc import Collection


def left_out_for(transports: Collection[str]) -> dict[str, str]:
    """`left_out` for a run whose hops are of these kinds: "auto" may take nccl."""
    return left_out(loads_kernels_at_once=not {"nccl", "auto"}.isdisjoint(transports))


def left_out(*, loads_kernels_at_once: bool = True) -> dict[str, str]:
    """What the user did not set, for `os.environ.update` before torch is loaded.

    `loads_kernels_at_once`: for transports whose waits are kernels, see `boundaries.warm_up`.
    """
    wanted = {
        # With a single hardware queue a transfer's wait would hold the compute behind it.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # To load a kernel late, CUDA may wait for a receive that is on the GPU: a deadlock.
        "CUDA_MODULE_LOADING": "EAGER" if loads_kernels_at_once else None,
        # Blocks of fixed size leave gaps as micro-batches come and go: 30 GB and more of 150 beside
        # eight layers on an H200 (docs/bench/memory-fixed-blocks.json). The other name is older.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
        else None,
    }
    return {name: value for name, value in wanted.items() if value and name not in os.environ}
