"""Where the rows of Engram tables lie, and when they are looked up.

Over several data ranks a table is cut by rows and never gathered: ranks ask each other for the rows
of a micro-batch, each once, and send their gradients back (`models.engram_rows`). It stays fp32 and
is its own master; FSDP leaves it alone. In a checkpoint it is a sharded tensor like others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ppruntime.config import Config
from ppruntime.connect import compute_dtype
from ppruntime.experts.exchange import ProcessExchange
from ppruntime.models.carry import MicroBatch
from ppruntime.models.engram import Engram, EngramOptions
from ppruntime.models.engram_kernels import engram_kernels
from ppruntime.models.engram_rows import Beside, TableRows, open_to_device
from ppruntime.ranks import Ranks, open_table_group
from ppruntime.schedules.ops import Kind, Op


def engram_options(config: Config, ranks: Ranks) -> EngramOptions:
    """How Engrams of this rank are built. Raises RuntimeError where their kernels cannot run."""
    on_host = config.engram.tables == "host"
    return EngramOptions(
        kernels=engram_kernels(config.kernels.engram, ranks.device, tables_on_host=on_host),
        rank=ranks.data_rank,
        num_ranks=ranks.layout.num_data_ranks,
        tables_on_host=on_host,
    )


def place_tables(config: Config, ranks: Ranks, units: Iterable[nn.Module]) -> None:
    """Puts a `TableRows` before every table of initialised units. A collective of the data ranks.

    Of several data ranks each table becomes a DTensor of the rows here; of one it stays what it is.
    """
    for engram in engrams_of(units):
        table, exchange = engram.table.detach(), None
        if config.engram.tables == "host" and ranks.device.type == "cuda":
            open_to_device(table)
        as_gradient: Callable[[Tensor], Tensor] = _as_it_is
        if ranks.layout.num_data_ranks > 1:
            # Half: who waits for a rank that waits in there hears the reason before its own limit.
            limit = config.pp.timeout_seconds / 2
            group = open_table_group(ranks, timeout_seconds=limit)
            exchange = ProcessExchange.of(group, "table group")
            shape = torch.Size((engram.num_rows, table.shape[1]))
            as_gradient = partial(_shard, ranks.data_mesh, shape)
            engram.table = nn.Parameter(as_gradient(table))
        beside = None
        if config.engram.lookups_ahead and ranks.device.type == "cuda":
            beside = Beside(torch.cuda.Stream(ranks.device))  # type: ignore[no-untyped-call]
        source = TableRows(
            table,
            num_rows=engram.num_rows,
            dtype=compute_dtype(config),
            device=ranks.device,
            exchange=exchange,
            kernels=engram.kernels,
            beside=beside,
        )
        engram.read_through(source, as_gradient)


def engrams_of(units: Iterable[nn.Module]) -> list[Engram]:
    """The Engrams in some units, in their order."""
    return [module for unit in units for module in unit.modules() if isinstance(module, Engram)]


def _as_it_is(sums: Tensor) -> Tensor:
    return sums


def _shard(mesh: DeviceMesh, shape: torch.Size, local: Tensor) -> Tensor:
    """`local` as this rank's rows of a tensor of `shape`. `DTensor.from_local` would move what lies
    on the host to the device."""
    meta = TensorMeta(shape, (shape[1], 1), local.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


class EngramLookups:
    """Lookups of one rank's stages through a step of an order: rows of all micro-batches are
    announced when it begins, and looked up `ahead` forwards of their stage early; 0: just before
    their own."""

    def __init__(self, stages: Mapping[int, Iterable[nn.Module]], *, ahead: int) -> None:
        found = {index: engrams_of(units) for index, units in stages.items()}
        self._engrams = {index: engrams for index, engrams in sorted(found.items()) if engrams}
        self._ahead = ahead

    def begin(self, batches: Sequence[MicroBatch]) -> None:
        """A step over `batches` begins. A collective of the data ranks."""
        for engrams in self._engrams.values():
            for engram in engrams:
                engram.announce(batches)

    def end(self) -> None:
        """Its last op is through."""
        for engrams in self._engrams.values():
            for engram in engrams:
                _source(engram).forget()

    def before(self, ops: Sequence[Op]) -> Mapping[Op, Callable[[], None]]:
        """What is done before some ops of one rank."""
        acts: dict[Op, Callable[[], None]] = {}
        for stage in self._engrams:
            own = [op for op in ops if op.stage == stage]
            forwards = [op.micro_batch for op in own if op.kind is Kind.F]
            for op in own:
                if op.kind not in (Kind.F, Kind.B, Kind.I):
                    continue
                starting: list[int] = []
                if op.kind is Kind.F:
                    place = forwards.index(op.micro_batch)
                    first = place + self._ahead if place else 0
                    starting = forwards[first : place + self._ahead + 1]
                acts[op] = partial(self._enter, stage, op.micro_batch, starting)
        return acts

    def _enter(self, stage: int, micro_batch: int, starting: Sequence[int]) -> None:
        for engram in self._engrams[stage]:
            source = _source(engram)
            for early in starting:
                source.start(early)
            source.turn = micro_batch


def _source(engram: Engram) -> TableRows:
    assert engram.source is not None, "place_tables comes first"
    return engram.source
