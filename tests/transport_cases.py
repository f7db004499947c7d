"""What the transport tests share: random pipelines, legal orders of calls, payloads, and ranks.

A scenario is a module-level function `scenario(rank, open_channels, *args)`. `run_scenario` runs it
once per rank over a kind of transport: `local` in threads of this process, others in new processes,
those on GPUs in processes that all scenarios share.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import rank_pool
import rank_process
import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from ppruntime.transports import local, open_transport, unavailable_reason
from ppruntime.transports.base import Boundary, Channel, TensorSpec, Transport

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)
GPU_KINDS = ("nccl", "copy_engine", "put")
POST, SEND, TAKE, RELEASE = "post", "send", "take", "release"

OpenChannels = Callable[..., Transport]
Call = tuple[str, Channel, int]


def kinds(num_ranks: int) -> list[Any]:
    """The kinds that this machine has for `num_ranks` ranks, as pytest parameters."""
    return ["local", "gloo", "shared_memory"] + [
        pytest.param(
            kind,
            id=f"over_{kind}",  # what `-k` can pick
            marks=[
                pytest.mark.multi_gpu,
                pytest.mark.skipif(
                    torch.cuda.device_count() < num_ranks
                    or unavailable_reason(kind, options(kind)) is not None,
                    reason=f"needs {num_ranks} GPUs and {kind}",
                ),
            ],
        )
        for kind in GPU_KINDS
    ]


def options(kind: str) -> dict[str, object]:
    """The options that this machine needs: put's NCCL, where PPRUNTIME_NCCL_LIBRARY names one."""
    library = os.environ.get("PPRUNTIME_NCCL_LIBRARY")
    return {"nccl_library": library} if kind == "put" and library else {}


def run_scenario(
    kind: str, num_ranks: int, scenario: Callable[..., Any], *args: Any, timeout_seconds: float = 60
) -> list[Any]:
    """`scenario(rank, open_channels, *args)` on every rank; the results in rank order.

    `open_channels(channels, timeout_seconds=20, pipeline="")` opens the rank's transport; ranks of
    different `pipeline` do not meet.
    """
    if kind in GPU_KINDS:
        return rank_pool.run_in_pool(
            num_ranks, _in_process, kind, scenario, args, timeout_seconds=timeout_seconds
        )
    if kind != "local":
        return rank_process.run_ranks(
            num_ranks, _in_process, kind, scenario, args, timeout_seconds=timeout_seconds
        )
    together = _LocalOpenings(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            results[rank] = scenario(rank, together.opener(rank), *args)
        except BaseException as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_seconds)
        assert not thread.is_alive(), f"a rank is not done after {timeout_seconds} s"
    if errors:
        raise rank_process.RanksFailed(f"ranks {[r for r, _ in errors]} failed") from errors[0][1]
    return results


def process_opener(rank: int, kind: str) -> OpenChannels:
    """`open_channels` of a process of its own, over the store that all ranks of the test share."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    on_gpu = kind in GPU_KINDS
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)

    def open_channels(
        channels: Sequence[Channel],
        timeout_seconds: float = 20,
        pipeline: str = "",
        rank: int = rank,
        **more_options: object,
    ) -> Transport:
        return open_transport(
            kind,
            channels,
            rank,
            device=device,
            timeout_seconds=timeout_seconds,
            store=PrefixStore(f"pipeline {pipeline}", store),
            **(options(kind) | more_options),
        )

    return open_channels


def _in_process(rank: int, kind: str, scenario: Callable[..., Any], args: Sequence[Any]) -> Any:
    return scenario(rank, process_opener(rank, kind), *args)


class _LocalOpenings:
    """Lets the threads of the ranks open transports together, as processes do through a store."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._opened: dict[tuple[str, int], tuple[Transport, ...]] = {}

    def opener(self, rank: int) -> OpenChannels:
        num_openings: dict[str, int] = {}

        def open_channels(
            channels: Sequence[Channel],
            timeout_seconds: float = 20,
            pipeline: str = "",
            rank: int = rank,
        ) -> Transport:
            number = num_openings[pipeline] = num_openings.get(pipeline, 0) + 1
            with self._lock:
                if (pipeline, number) not in self._opened:
                    self._opened[pipeline, number] = local.open_ranks(
                        channels,
                        self._num_ranks,
                        device=torch.device("cpu"),
                        timeout_seconds=timeout_seconds,
                    )
            return self._opened[pipeline, number][rank]

        return open_channels


# Pipelines


def random_boundary(rng: random.Random, max_tensors: int = 4) -> Boundary:
    """1 to 4 tensors of mixed dtypes: scalars, empty ones, odd sizes among them."""

    def shape() -> tuple[int, ...]:
        extents = (0, 1, 2, 3, 5, 8, 17, 31)
        return tuple(rng.choice(extents) for _ in range(rng.randint(0, 3)))

    return Boundary(
        tuple(
            TensorSpec(f"t{i}", shape(), rng.choice(DTYPES))
            for i in range(rng.randint(1, max_tensors))
        )
    )


def pipeline_channels(
    stage_to_rank: Sequence[int], rng: random.Random, max_slots: int = 4
) -> tuple[Channel, ...]:
    """A forward and a backward channel between all neighbouring stages, with random boundaries."""
    channels = []
    for stage in range(len(stage_to_rank) - 1):
        for kind, src, dst in (("forward", stage, stage + 1), ("backward", stage + 1, stage)):
            channels.append(
                Channel(
                    id=len(channels),
                    kind=kind,
                    src_rank=stage_to_rank[src],
                    dst_rank=stage_to_rank[dst],
                    src_stage=src,
                    dst_stage=dst,
                    boundary=random_boundary(rng),
                    slots=rng.randint(1, max_slots),
                )
            )
    return tuple(channels)


def ring_channels(num_ranks: int, rng: random.Random) -> tuple[Channel, ...]:
    """A channel from every rank to the next, the last rank's to the first."""
    return tuple(
        Channel(
            r, "forward", r, (r + 1) % num_ranks, r, r + 1, random_boundary(rng), rng.randint(1, 4)
        )
        for r in range(num_ranks)
    )


# Payloads


def payload(
    channel: Channel, micro_batch: int, seed: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """The tensors that cross `channel` for `micro_batch`: the same bytes on both ends, no two
    alike."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + channel.id * 10_007 + micro_batch)
    tensors = []
    for spec in channel.boundary.tensors:
        high = 2 if spec.dtype == torch.bool else 256
        raw = torch.randint(0, high, (spec.num_bytes,), dtype=torch.uint8, generator=generator)
        # Any bits will do, NaNs too: they must arrive as they are.
        tensor = (
            raw.view(spec.dtype).view(spec.shape) if spec.num_bytes else torch.empty(spec.shape)
        )
        tensors.append(tensor.to(device, spec.dtype))
    return tuple(tensors)


def assert_same_bits(got: Sequence[Tensor], expected: Sequence[Tensor], where: str) -> None:
    assert len(got) == len(expected), where
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{where}, tensor {i}"
        same = torch.equal(_bits(a), _bits(b))
        assert same, f"{where}, tensor {i}: other bits than were sent"


def poison(tensors: Sequence[Tensor]) -> None:
    """Overwrites a slot, as its owner may until the release."""
    for tensor in tensors:
        _bits(tensor).fill_(1 if tensor.dtype == torch.bool else 0xA5)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


# Orders of calls


def legal_order(
    channels: Sequence[Channel], num_messages: dict[int, int], rng: random.Random
) -> dict[int, list[Call]]:
    """Each rank's calls for one step, taken at random from what is legal when all ranks act in
    turn.

    So the calls can all be made, whatever the ranks' relative speed. The micro-batches of a channel
    are in random order, the same on both ends; slots are released in any order.
    """
    ends = [_End(c, rng.sample(range(num_messages[c.id]), num_messages[c.id])) for c in channels]
    orders: dict[int, list[Call]] = {r: [] for c in channels for r in (c.src_rank, c.dst_rank)}
    while True:
        legal = [(end, name) for end in ends for name in end.legal()]
        if not legal:
            return orders
        end, name = rng.choice(legal)
        rank = end.channel.src_rank if name == SEND else end.channel.dst_rank
        orders[rank].append((name, end.channel, end.do(name, rng)))


class _End:
    """Where a channel's messages are while an order is made up."""

    def __init__(self, channel: Channel, micro_batches: list[int]) -> None:
        self.channel = channel
        self._micro_batches = micro_batches
        self._done = {POST: 0, SEND: 0, TAKE: 0}
        self._taken: list[int] = []
        self._ring: list[int] = []  # slots go round: the oldest unreleased and all later hold one

    def legal(self) -> list[str]:
        total, done = len(self._micro_batches), self._done
        return [
            name
            for name, is_legal in (
                (POST, done[POST] < total and len(self._ring) < self.channel.slots),
                (SEND, done[SEND] < total),
                (TAKE, done[TAKE] < min(done[POST], done[SEND])),
                (RELEASE, bool(self._taken)),
            )
            if is_legal
        ]

    def do(self, name: str, rng: random.Random) -> int:
        if name == RELEASE:
            micro_batch = self._taken.pop(rng.randrange(len(self._taken)))
            held = self._taken + self._micro_batches[self._done[TAKE] : self._done[POST]]
            while self._ring and self._ring[0] not in held:
                self._ring.pop(0)
            return micro_batch
        micro_batch = self._micro_batches[self._done[name]]
        self._done[name] += 1
        if name == POST:
            self._ring.append(micro_batch)
        if name == TAKE:
            self._taken.append(micro_batch)
        return micro_batch


def run_order(
    transport: Transport,
    calls: Sequence[Call],
    seed: int,
    *,
    delay: Callable[[], None] = lambda: None,
    device: torch.device | str = "cpu",
) -> int:
    """Makes the calls, compares every receive bitwise at its take and again at its release, poisons
    the slot, ends the step. Gives the number of messages received."""
    held: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    num_received = 0
    for name, channel, micro_batch in calls:
        delay()
        where = f"seed {seed}, {channel}, micro-batch {micro_batch}"
        if name == POST:
            transport.post(channel, micro_batch)
        elif name == SEND:
            transport.send(channel, micro_batch, payload(channel, micro_batch, seed, device))
        elif name == TAKE:
            tensors = held[channel.id, micro_batch] = transport.take(channel, micro_batch)
            assert_same_bits(tensors, payload(channel, micro_batch, seed, device), where)
            num_received += 1
        else:
            tensors = held.pop((channel.id, micro_batch))
            assert_same_bits(tensors, payload(channel, micro_batch, seed, device), f"{where}, held")
            poison(tensors)
            transport.release(channel, micro_batch)
    transport.step_end()
    return num_received
