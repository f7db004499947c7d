"""How many bytes of the tensors that a piece of code makes are alive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorder(TorchDispatchMode):
    """Remembers, weakly, every storage that is made while it is on."""

    def __init__(self, *, samples_every_op: bool) -> None:
        super().__init__()
        self._samples_every_op = samples_every_op
        self._refs: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(t)._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        for tensor in filter(is_tensor, tree_leaves(out)):
            storage = storage_of(tensor)
            if storage._cdata not in given:
                self._refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._samples_every_op:
            self.sample()
        return out

    def sample(self) -> int:
        """Bytes of the storages that live now."""
        self._refs = {key: kept for key, kept in self._refs.items() if not kept[0].expired()}
        live_bytes = sum(num_bytes for _, num_bytes in self._refs.values())
        self.peak_bytes = max(self.peak_bytes, live_bytes)
        return live_bytes


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
