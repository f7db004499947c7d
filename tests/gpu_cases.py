"""What the tests of the GPU transports share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from transport_cases import Call

from ppruntime.transports.base import Channel


def in_turn_order(
    channels: Sequence[Channel], num_messages: dict[int, int], rng: random.Random
) -> dict[int, list[Call]]:
    """Each rank's calls for one step, at random from what is legal when slots are released in the
    order of the posts, as slots that a peer writes have to be."""
    state = {c.id: dict.fromkeys(("post", "send", "take", "release"), 0) for c in channels}
    orders: dict[int, list[Call]] = {r: [] for c in channels for r in (c.src_rank, c.dst_rank)}
    while True:
        legal = []
        for c in channels:
            s, total = state[c.id], num_messages[c.id]
            if s["post"] < total and s["post"] - s["release"] < c.slots:
                legal.append((c, "post"))
            if s["send"] < total:
                legal.append((c, "send"))
            if s["take"] < min(s["post"], s["send"]):
                legal.append((c, "take"))
            if s["release"] < s["take"]:
                legal.append((c, "release"))
        if not legal:
            return orders
        channel, name = rng.choice(legal)
        micro_batch = state[channel.id][name]
        state[channel.id][name] += 1
        orders[channel.src_rank if name == "send" else channel.dst_rank].append(
            (name, channel, micro_batch)
        )
