"""The fused MoE layer over the GPUs of one host: config -> dispatcher `mega_moe`.

Each rank's arena is device memory that the others of its expert group have mapped, see
`transports.peer_memory`: it lies outside torch's allocator, has one size for the whole run, and a
rank that dies takes no memory away from under its peers.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from ppruntime.config import Config, ConfigError
from ppruntime.experts.arena_bytes import arena_shape
from ppruntime.experts.exchange import ProcessExchange
from ppruntime.experts.hosts import host_facts
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.mega_moe import MegaMoe
from ppruntime.models.mega_moe_arena import Arena
from ppruntime.models.mega_moe_passes import MegaMoeOptions
from ppruntime.models.mega_moe_rules import ArenaShape
from ppruntime.ranks import Ranks, open_expert_group
from ppruntime.transports.agree import Fact, agree
from ppruntime.transports.driver import Driver
from ppruntime.transports.peer_memory import (
    MappedMemory,
    allocate,
    map_peer,
    swap_descriptors,
    tensor_at,
)


def open_mega_moe(
    config: Config, ranks: Ranks, *, timeout_seconds: float, gemm_sms: GemmSms | None = None
) -> MegaMoe:
    """The fused layer over the ranks that this rank shares its experts with, one alone included. A
    collective of these ranks. No wait on a device takes longer than `timeout_seconds`. `gemm_sms`:
    what may change in a step; None: the config's, for good.

    Raises ConfigError, alike on all ranks, if the GPU has too few multiprocessors.
    """
    dispatch = config.moe.dispatch
    num_sms = torch.cuda.get_device_properties(ranks.device).multi_processor_count
    if dispatch.transfer_sms >= num_sms:
        raise ConfigError(
            f"moe.dispatch.transfer_sms = {dispatch.transfer_sms} leaves none of {num_sms} "
            "multiprocessors for the products that run beside it; use fewer"
        )
    exchange = ProcessExchange.of(open_expert_group(ranks, timeout_seconds=timeout_seconds))
    store = ranks.world_store("arenas")
    # The n-th opening of this rank meets the n-th of the others, under names of its own.
    number = store.add(f"openings of rank {ranks.rank}", 1)
    arena = open_arena(
        arena_shape(config),
        exchange.ranks,
        ranks.rank,
        ranks.device,
        PrefixStore(f"opening {number} of {exchange.name}", store),
        timeout_seconds=timeout_seconds,
    )
    options = MegaMoeOptions(
        num_sms=dispatch.transfer_sms,
        gemm_sms=gemm_sms or GemmSms(config.pp.gemm_sms),
        capacity_factor=dispatch.capacity_factor,
        fp8_grad=dispatch.fp8_grad,
    )
    return MegaMoe(exchange, arena, options)


def open_arena(
    shape: ArenaShape,
    group: tuple[int, ...],
    rank: int,
    device: torch.device,
    store: Store,
    *,
    timeout_seconds: float,
) -> Arena:
    """This rank's arena, mapped by all of `group`, and theirs mapped here. A collective; `store` is
    this group's own. The arena's `close` unmaps, when nothing on the device uses it any more."""
    agree(
        PrefixStore("hosts", store),
        rank,
        group,
        [Fact("the arena's bytes", str(shape.num_bytes)), *host_facts("mega_moe", group)],
        timeout_seconds=timeout_seconds,
        what="mapping each other's memory for moe.dispatch.type = mega_moe",
    )
    driver = Driver(device)
    assert device.index is not None, device
    own, descriptor = allocate(driver, device.index, shape.num_bytes)
    mapped: list[MappedMemory] = [own]
    addresses = [0] * len(group)
    try:
        memory = tensor_at(own.address, own.num_bytes, device)
        memory.zero_()
        torch.cuda.synchronize(device)  # before any peer can write
        for place, peer in enumerate(group):
            if peer == rank:
                addresses[place] = own.address
                continue
            # All go through the pairs in one order, so none waits in a circle.
            first, second = sorted((rank, peer))
            theirs, num_bytes = swap_descriptors(
                store,
                f"arenas of ranks {first} and {second}",
                descriptor,
                own.num_bytes,
                is_first=rank == first,
                timeout_seconds=timeout_seconds,
            )
            try:
                mapped.append(map_peer(driver, device.index, theirs, num_bytes))
            finally:
                os.close(theirs)
            addresses[place] = mapped[-1].address
    except BaseException:
        for one in mapped:
            with suppress(Exception):  # the first error is the one to tell
                one.free()
        raise
    finally:
        os.close(descriptor)

    def close() -> None:
        torch.cuda.synchronize(device)
        for one in mapped:
            one.free()

    return Arena(
        shape,
        memory,
        addresses,
        group.index(rank),
        limit=int(timeout_seconds * 1e9),
        ranks=group,
        close=close,
    )
