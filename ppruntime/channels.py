"""Stages' boundaries and an order's slots -> the channels of one pipeline. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ppruntime.models.carry import DIFFERENTIABLE
from ppruntime.schedules.counts import Edge
from ppruntime.transports.base import Boundary, Channel


def make_channels(
    boundaries: Sequence[Boundary],
    stage_to_rank: Sequence[int],
    slots: Mapping[Edge, int],
) -> tuple[Channel, ...]:
    """Two channels per hop, numbered alike on every rank: forward, then backward.

    `boundaries[s]` is what stage s hands to stage s + 1. Backwards go the gradients of the fields
    that have one.
    """
    channels: list[Channel] = []
    for stage, boundary in enumerate(boundaries):
        gradients = Boundary(tuple(t for t in boundary.tensors if t.name in DIFFERENTIABLE))
        here, there = stage_to_rank[stage], stage_to_rank[stage + 1]
        channels += (
            Channel(
                id=2 * stage,
                kind="forward",
                src_rank=here,
                dst_rank=there,
                src_stage=stage,
                dst_stage=stage + 1,
                boundary=boundary,
                slots=slots[Edge(stage, stage + 1, "F")],
            ),
            Channel(
                id=2 * stage + 1,
                kind="backward",
                src_rank=there,
                dst_rank=here,
                src_stage=stage + 1,
                dst_stage=stage,
                boundary=gradients,
                slots=slots[Edge(stage + 1, stage, "B")],
            ),
        )
    return tuple(channels)


def hop_of(channel: Channel) -> int:
    """Its place in a list with one entry for each hop, whichever way it goes."""
    return min(channel.src_stage, channel.dst_stage)


def edge_of(channel: Channel) -> Edge:
    """The channel's edge in the order's terms."""
    kind: Literal["F", "B"] = "F" if channel.kind == "forward" else "B"
    return Edge(channel.src_stage, channel.dst_stage, kind)
