"""Runs a function as several ranks of this host, for benches: a process each, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "torch.distributed.pipelining", "ppruntime.sleep_rig"]


class RankFailed(RuntimeError):
    """A rank raised, died or said nothing for too long; the text has its traceback."""


def run_on_ranks(
    num_ranks: int,
    function: Callable[..., Iterator[Any]],  # what it is called with and gives is the caller's
    *args: object,
    timeout_seconds: float,
) -> Iterator[tuple[Any, ...]]:
    """Runs the generator function `function(rank, *args)` on every rank and gives, for each of its
    values, those of all ranks in rank order.

    `function` is at module level, `args` and values are what pickle takes. In the processes
    `torch.distributed` is initialised with gloo, and torch has one thread. Raises RankFailed if no
    value comes for `timeout_seconds`, or none can; no process is left behind.
    """
    from torch._C._distributed_c10d import TCPStore

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks, which do not compute
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")  # loads torch once, not once a rank
    context.set_forkserver_preload(_PRELOAD)
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(num_ranks):
            pipe, child_end = context.Pipe(duplex=False)
            process = context.Process(
                target=_main, args=(child_end, rank, num_ranks, store.port, function, args)
            )
            process.start()
            child_end.close()
            pipes.append(pipe)
            processes.append(process)
        while values := _next_values(pipes, timeout_seconds):
            yield values
    finally:
        for process in processes:
            process.kill()
            process.join()


def _next_values(pipes: Sequence[Connection], timeout_seconds: float) -> tuple[Any, ...]:
    """One value per rank, in rank order; nothing when all ranks are at their end."""
    deadline = time.monotonic() + timeout_seconds
    messages: dict[Connection, tuple[Any] | None] = {}
    while waiting := [pipe for pipe in pipes if pipe not in messages]:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank, pipe in enumerate(pipes) if pipe in waiting]
            raise RankFailed(f"ranks {late} gave no result for {timeout_seconds:g} s")
        for pipe in ready:  # so that a failed rank is heard of although others wait for it
            assert isinstance(pipe, Connection)
            messages[pipe] = _receive(pipes.index(pipe), pipe)
    values = tuple(m[0] for pipe in pipes if (m := messages[pipe]) is not None)
    assert len(values) in (0, len(pipes)), "the ranks gave different numbers of values"
    return values


def _receive(rank: int, pipe: Connection) -> tuple[Any] | None:
    """The rank's next value, or None at its end."""
    try:
        message: tuple[Any] | str | None = pipe.recv()
    except EOFError:
        raise RankFailed(f"rank {rank} died") from None
    if isinstance(message, str):
        raise RankFailed(f"rank {rank} failed:\n{message}")
    return message


def _main(
    pipe: Connection,
    rank: int,
    num_ranks: int,
    port: int,
    function: Callable[..., Iterator[Any]],
    args: tuple[object, ...],
) -> None:
    """The process of one rank. A value goes out as a tuple of one, the end as None, an error as
    its text."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    try:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
        )
        for value in function(rank, *args):
            pipe.send((value,))
        pipe.send(None)
        dist.barrier()  # no rank leaves while another still talks to it
    except BaseException:  # whatever it is, the parent gets to see it
        pipe.send(traceback.format_exc())
    pipe.close()
    os._exit(0)  # a process group whose peers are gone may not close
