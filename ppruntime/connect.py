"""Config -> the channels, transport and executors of one rank: what training and benches share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppruntime.activation_offload import ActivationOffload
from ppruntime.boundaries import expected_boundaries
from ppruntime.channels import edge_of, hop_of, make_channels
from ppruntime.clocks import CudaClock, HostClock
from ppruntime.config import Config, one_transport
from ppruntime.executor import Computes, Executor, LooksAhead
from ppruntime.gemm_budget import GemmBudget, transport_ctas
from ppruntime.lanes import Lanes
from ppruntime.master_offload import MasterOffload
from ppruntime.order import Order, make_order
from ppruntime.plan import StagePlan, cut
from ppruntime.ranks import Ranks
from ppruntime.schedules.counts import Edge
from ppruntime.schedules.credits import uncredited
from ppruntime.schedules.ops import Schedule
from ppruntime.transports import open_transport
from ppruntime.transports.base import Boundary, Channel, Transport


@dataclass(frozen=True, slots=True)
class Outline:
    """What the configuration alone decides of a pipeline, the same on every rank."""

    order: Order
    plan: tuple[StagePlan, ...]
    boundaries: tuple[Boundary, ...]
    """Entry s is what stage s hands to stage s + 1."""
    channels: tuple[Channel, ...]

    def received(self, stage: int) -> Boundary | None:
        """What the stage reads; None for the first."""
        return self.boundaries[stage - 1] if stage else None


def compute_dtype(config: Config) -> torch.dtype:
    """The type of activations and of the weights they are multiplied with."""
    return torch.float32 if config.train.precision == "fp32" else torch.bfloat16


def make_outline(config: Config) -> Outline:
    """The pipeline's order, cut, boundaries and channels. Pure."""
    train, dims, order = config.train, config.model.dims, make_order(config)
    stage_to_rank = order.computations.stage_to_rank
    plan = cut(dims, stage_to_rank, config.pp.layers_per_stage, seq_len=train.seq_len)
    boundaries = expected_boundaries(
        dims,
        plan,
        batch=train.micro_batch_size,
        seq_len=train.seq_len,
        dtype=compute_dtype(config),
    )
    channels = make_channels(boundaries, stage_to_rank, order.slots)
    return Outline(order, plan, boundaries, channels)


def connect(
    outline: Outline,
    ranks: Ranks,
    orders: Sequence[Schedule],
    *,
    kind: str | Sequence[str],
    timeout_seconds: float,
    options: Mapping[str, Any],
    tell_kinds: Callable[[Mapping[int, str]], object] = lambda _: None,
) -> Transport:
    """Opens this rank's ends of the channels for the lowered `orders` that will run over them. A
    collective of the pipeline. On GPUs channels whose slots they prove free go without credits.
    `kind` is that of all hops, or one for each; for `tell_kinds` see `open_transport`."""
    proven: frozenset[Edge] = frozenset()
    if ranks.device.type == "cuda":
        proven = uncredited(orders, outline.order.slots, pairs=outline.order.pairs)
    return open_transport(
        kind if isinstance(kind, str) else {c.id: kind[hop_of(c)] for c in outline.channels},
        outline.channels,
        ranks.pp_rank,
        device=ranks.device,
        timeout_seconds=timeout_seconds,
        store=ranks.pipeline_store(),
        uncredited=frozenset(c.id for c in outline.channels if edge_of(c) in proven),
        tell_kinds=tell_kinds,
        **options,
    )


def kinds_note(config: Config, channels: Sequence[Channel], kind_of: Mapping[int, str]) -> str:
    """What "auto" took, for the user; empty where it had no say. Pure."""
    pp = config.pp
    leaving = [c for c in channels if c.kind == "forward" and c.src_rank != c.dst_rank]
    if "auto" not in pp.transport_names or not leaving or not kind_of:
        return ""
    hops_of: dict[str, list[str]] = {}
    for c in leaving:
        if isinstance(pp.transport, str) or pp.transport[hop_of(c)] == "auto":
            hops_of.setdefault(kind_of[c.id], []).append(f"{c.src_stage}-{c.dst_stage}")
    took = " and ".join(
        f"{kind} between stages {', '.join(hops)}" if len(hops_of) > 1 else kind
        for kind, hops in hops_of.items()
    )
    return f'pp.transport = "auto" took {took}' if took else ""


def transport_options(config: Config) -> dict[str, Any]:
    """What `[pp]` says to the transport; keys that are not given leave it its own choice."""
    pp = config.pp
    options = {
        "transport_ctas": transport_ctas(config),
        "recv_lead": pp.recv_lead,
        "nccl_library": pp.nccl_library,
    }
    return {name: value for name, value in options.items() if value is not None}


def open_beside(config: Config, ranks: Ranks, channels: Sequence[Channel]) -> Transport:
    """This rank's ends of channels of one's own, moved as the run's boundaries are: for
    calibrations and emulations. A collective of the pipeline."""
    return open_transport(
        one_transport(config),
        channels,
        ranks.pp_rank,
        device=ranks.device,
        timeout_seconds=config.pp.timeout_seconds,
        store=ranks.pipeline_store(),
        **transport_options(config),
    )


def make_executor(
    outline: Outline,
    schedule: Schedule,
    ranks: Ranks,
    stages: Mapping[int, Computes],
    transport: Transport,
    *,
    training: bool = True,
    offload: ActivationOffload | None = None,
    masters: MasterOffload | None = None,
    lookups: LooksAhead | None = None,
    lanes: Lanes | None = None,
    budget: GemmBudget | None = None,
) -> Executor:
    """This rank's part of a lowered order, on the clock of its device; see `Executor`. The pairs of
    a training order overlap if `lanes` do."""
    return Executor(
        schedule,
        ranks.pp_rank,
        stages,
        outline.channels,
        transport,
        clock=CudaClock() if ranks.device.type == "cuda" else HostClock(),
        training=training,
        offload=offload,
        masters=masters,
        lookups=lookups,
        lanes=lanes,
        pairs=outline.order.pairs if training else (),
        budget=budget,
    )
