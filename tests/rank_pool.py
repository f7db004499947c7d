"""Rank processes that stay: on a GPU what a test costs is mostly starting them, not the test.

A pool's processes run one call after the other, each as `rank_process.run_ranks` would, so a test
finds CUDA and its libraries loaded. Every call has a store of its own, so process groups and names
are its own too. After a call that failed or was too late the pool is ended and the next call starts
another one: no test meets what a broken one left behind.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from rank_process import PRELOAD, RanksFailed, _pickled_error, _resolve, make_warnings_errors

_pools: dict[int, RankPool] = {}


def run_in_pool(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 60
) -> list[Any]:
    """As `rank_process.run_ranks`, in processes that later calls use again."""
    if num_ranks not in _pools:
        _pools[num_ranks] = RankPool(num_ranks)
    pool = _pools[num_ranks]
    try:
        return pool.run(function, *args, timeout_seconds=timeout_seconds)
    except BaseException:
        _pools.pop(num_ranks).end()
        raise


@atexit.register
def end_pools() -> None:
    """Ends all processes that wait for a call."""
    while _pools:
        _pools.popitem()[1].end()


class RankPool:
    """`num_ranks` processes that wait for calls, and the stores of the calls so far."""

    def __init__(self, num_ranks: int) -> None:
        self._stores: list[Any] = []
        """TCPStores. They stay: what an earlier call has left running may ask one once more."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._stacks = [tempfile.NamedTemporaryFile("r") for _ in range(num_ranks)]  # noqa: SIM115
        self._processes = []
        for rank in range(num_ranks):
            pipe, child_end = context.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
            process = context.Process(
                target=_serve, args=(child_end, self._stacks[rank].name, environment), daemon=True
            )
            process.start()
            child_end.close()
            self._pipes.append(pipe)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float) -> list[Any]:
        """`function(rank, *args)` on every rank; the results in rank order. Raises RanksFailed with
        what each rank said, or where it was; the pool must then be ended."""
        from torch.distributed import TCPStore

        num_ranks = len(self._pipes)
        store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
        self._stores.append(store)
        module = sys.modules[function.__module__]
        call = (function.__module__, module.__file__, function.__qualname__, pickle.dumps(args))
        for pipe in self._pipes:
            pipe.send((store.port, call))
        deadline = time.monotonic() + timeout_seconds
        values: dict[int, Any] = {}
        texts: dict[int, str] = {}
        # The first failure decides: the other ranks may wait for that one.
        while len(values) < len(self._pipes) and not texts:
            waiting = {p: rank for rank, p in enumerate(self._pipes) if rank not in values}
            ready = multiprocessing.connection.wait(
                list(waiting), max(0.0, deadline - time.monotonic())
            )
            if not ready:
                texts |= {rank: self._stack(rank) for rank in waiting.values()}
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    value, _, text = pickle.loads(pipe.recv_bytes())  # noqa: S301 (our own)
                except EOFError:
                    self._processes[rank].join(5)
                    text = f"the process ended, exit code {self._processes[rank].exitcode}"
                if text is None:
                    values[rank] = value
                else:
                    texts[rank] = text
        if texts:
            lines = (f"--- rank {rank} ---\n{text}" for rank, text in sorted(texts.items()))
            raise RanksFailed("\n".join(lines))
        return [values[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        """Kills the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        for stack in self._stacks:
            stack.close()

    def _stack(self, rank: int) -> str:
        if self._processes[rank].is_alive():
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(1)
        self._stacks[rank].seek(0)
        return f"no result in time; it was here:\n{self._stacks[rank].read()}"


def _serve(
    pipe: multiprocessing.connection.Connection, stack_path: str, environment: dict[str, str]
) -> None:
    """The process of one rank: runs calls until the pipe closes."""
    os.environ.update(environment)
    # As every GPU test wants it, before the first call into CUDA.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    stack = open(stack_path, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            port, call = pipe.recv()
        except EOFError:
            os._exit(0)
        os.environ["MASTER_PORT"] = str(port)
        try:
            with warnings.catch_warnings():
                make_warnings_errors()
                function, args = _resolve(call)
                payload = pickle.dumps((function(int(environment["RANK"]), *args), None, None))
        except BaseException as error:  # whatever it is, the test process gets to see it
            payload = _pickled_error(error)
        # Now, on all ranks: some memory between GPUs is given back by both of its ends together.
        gc.collect()
        pipe.send_bytes(payload)
