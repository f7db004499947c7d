"""Expert groups whose dispatcher works inside a host alone."""

from __future__ import annotations

import socket

from ppruntime.transports.agree import Fact


def host_facts(kind: str, group: tuple[int, ...]) -> tuple[Fact, ...]:
    """What the ranks of an expert group have to hold alike for moe.dispatch.type = `kind`; nothing
    where it works over hosts. To be agreed upon by all ranks, also those of other groups: all hear
    of a group over two hosts, and none waits for it."""
    if kind == "torch" or len(group) == 1:
        return ()
    return (
        Fact(
            f"the host of the experts of ranks {', '.join(map(str, group))}",
            socket.gethostname(),
            group,
            f'moe.dispatch.type = "{kind}" works inside a host: give each parallel.ep ='
            f' {len(group)} neighbouring ranks one host, or use "torch", which works over hosts',
        ),
    )
