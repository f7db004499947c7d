"""Memory of a GPU that torch's allocator leaves to others.

The allocator keeps what it once had. NCCL, CUDA's modules and transports ask the driver, which does
not ask the allocator back: a run whose allocator had all of a GPU, 24 GB of it unused, ended where
NCCL wanted 4 bytes.
"""

from __future__ import annotations

import torch

ROOM_BYTES = 1 << 30


def leave_room(device: torch.device) -> None:
    """From here on the allocator gives back what it does not use rather than take the last
    `ROOM_BYTES` of the GPU. To be called once nearly all is open that is not the allocator's; does
    nothing on a CPU."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    torch.cuda.set_per_process_memory_fraction(share_of_device(free, total, reserved), device)


def share_of_device(free: int, total: int, reserved: int) -> float:
    """Of `total` bytes what the allocator, which has `reserved` now, may have at the most: never
    less than it has. Pure."""
    return max(reserved, reserved + free - ROOM_BYTES) / total
