"""Config -> what brings tokens to the experts of this rank's stages."""

from __future__ import annotations

from ppruntime.config import Config
from ppruntime.expert_exchange import ProcessExchange
from ppruntime.models.all_to_all import AllToAll
from ppruntime.models.dispatch import AllHere, Dispatcher
from ppruntime.ranks import Ranks, open_expert_group


def open_dispatcher(config: Config, ranks: Ranks, *, timeout_seconds: float) -> Dispatcher:
    """The dispatcher that the config names, over the ranks that this rank shares its experts with;
    an exchange may take so long. One serves all stages of the rank. A collective of these ranks."""
    if ranks.layout.ep == 1:
        return AllHere()
    exchange = ProcessExchange.of(open_expert_group(ranks, timeout_seconds=timeout_seconds))
    return AllToAll(exchange)
