"""fp32 masters that lie on the host while nothing needs them.

FSDP gathers a unit's weights in the compute dtype once a step, at its first forward; from then on
the fp32 shards wait for the optimizer. A stage's shards leave behind its first forward, their
memory is free once sums of gradients are made, and they come back once its last micro-batch's
forward and the backward that follows are through: then the stage holds one micro-batch less than at
its peak. `master_moments` says before which computations.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.cuda import Event
from torch.distributed.tensor import DTensor

from ppruntime.host_memory import (
    HostPool,
    Lane,
    Page,
    as_bytes,
    bytes_back_to_back,
    pieces,
    wait_for,
)
from ppruntime.models.engram import Engram


class MasterOffload:
    """The masters of one rank's stages. Bitwise: the bytes that come back are those that left."""

    def __init__(
        self, stages: Mapping[int, nn.Module], device: torch.device, pool: HostPool
    ) -> None:
        self._pool = pool
        self._outwards, self._homewards = Lane(device), Lane(device)
        self._masters = {index: _masters(units) for index, units in stages.items()}
        self._away: dict[int, _Away] = {}
        self._back: dict[int, Event | None] = {}
        # At first the pool of the stream on which they were made, which may be another stage's
        # lane; later that of the stage's own.
        self._owners: dict[int, torch.cuda.Stream | None] = dict.fromkeys(
            stages, self._outwards.current()
        )

    def num_bytes(self, stage: int) -> int:
        """What the stage's masters take up on the device when they are there."""
        return sum(master.nbytes() for master in self._masters[stage])

    def leave(self, stage: int) -> None:
        """Starts the copies to the host. The masters must have been gathered."""
        masters = self._masters[stage]
        pages = self._pool.take(bytes_back_to_back(m.nbytes() for m in masters))
        gone = self._outwards.copy(
            pieces([as_bytes(m) for m in masters], pages), after=[p.last_read for p in pages]
        )
        self._away[stage] = _Away([m.nbytes() for m in masters], pages, gone)

    def left(self, stage: int) -> None:
        """The current stream waits for the copies; the device's memory is free."""
        wait_for(self._away[stage].gone, owner=self._owners[stage])
        for master in self._masters[stage]:
            master.resize_(0)

    def come_back(self, stage: int) -> None:
        """Starts the way back, into memory of the current stream's pool."""
        masters, away = self._masters[stage], self._away.pop(stage)
        self._owners[stage] = self._homewards.current()
        for master, size in zip(masters, away.sizes, strict=True):
            master.resize_(size)
        targets = [as_bytes(master) for master in masters]
        pairs = ((page, target) for target, page in pieces(targets, away.pages))
        back = self._homewards.copy(pairs, after=[away.gone])
        self._pool.give(away.pages, back)
        self._back[stage] = back

    def arrive(self, stage: int) -> None:
        """Before anything reads the stage's masters: the current stream waits until they are
        back."""
        assert stage not in self._away, f"the masters of stage {stage} never came back"
        wait_for(self._back.pop(stage, None))


class _Away:
    __slots__ = ("gone", "pages", "sizes")

    def __init__(self, sizes: list[int], pages: list[Page], gone: Event | None) -> None:
        self.sizes, self.pages, self.gone = sizes, pages, gone


def _masters(units: nn.Module) -> list[torch.UntypedStorage]:
    """The memory of the shards, each piece once. Engram's tables are read by every forward: they
    stay."""
    found: dict[int, torch.UntypedStorage] = {}
    tables = {id(m.table) for m in units.modules() if isinstance(m, Engram)}
    for param in units.parameters():
        if isinstance(param, DTensor) and id(param) not in tables:
            local: Tensor = param.to_local()
            storage = local.untyped_storage()
            found.setdefault(int(storage._cdata), storage)
    return [storage for storage in found.values() if storage.nbytes()]
