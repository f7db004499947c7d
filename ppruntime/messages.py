"""Small messages between ranks as byte tensors. Nothing that arrives is ever unpickled.

Every function is a collective: all ranks of the group call it, in the same order. None as the group
means one process on its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small tensors for this group's collectives lie: the host, unless it has NCCL alone."""
    if group is None or "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_bytes(payload: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's payload on every rank, by rank of the group. Lengths may differ and may be 0."""
    if group is None:
        return [payload]
    device = collective_device(group)
    size = dist.get_world_size(group)
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    lengths[dist.get_rank(group)] = len(payload)
    dist.all_reduce(lengths, group=group)
    width = max(1, int(lengths.max()))
    mine = torch.zeros(width, dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = [torch.empty(width, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(rows, mine.to(device), group=group)
    return [
        row[:length].cpu().numpy().tobytes()
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]


def broadcast_bytes(payload: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The payload of the group's rank 0 on every rank; what the others pass is not looked at."""
    if group is None:
        return payload
    return gather_bytes(payload if dist.get_rank(group) == 0 else b"", group)[0]


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `flag` is set on some rank, the same on every rank."""
    if group is None:
        return flag
    count = torch.tensor(int(flag), device=collective_device(group))
    dist.all_reduce(count, group=group)
    return bool(count)


def first_complaint(complaint: str | None, group: dist.ProcessGroup | None) -> str | None:
    """The complaint of the lowest rank that has one, on every rank; None if nobody has any.

    With it all ranks raise alike instead of one raising and the others waiting.
    """
    heard = gather_bytes((complaint or "").encode(), group)
    return next((text.decode() for text in heard if text), None)
