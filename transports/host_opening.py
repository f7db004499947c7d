"""How the kinds that move host memory open: one way to check what they are asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.distributed_c10d import Store

from ppruntime.transports.base import TransportError


def checked_store(
    kind: str, device: torch.device, options: Mapping[str, object], store: Store | None
) -> Store:
    """The store by which the ranks of `kind` meet. Raises TransportError for another device than
    the CPU, for any option, and if there is no store."""
    if device.type != "cpu":
        raise TransportError(
            f"{kind} moves host memory, the device is {device}; use nccl, copy_engine or put"
        )
    if options:
        raise TransportError(f"{kind} takes no options, got {sorted(options)}; remove them")
    if store is None:
        raise TransportError(
            f"{kind} needs a store by which the ranks find each other; pass store="
        )
    return store
