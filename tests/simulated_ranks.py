"""Ranks of the GPU transports over a simulated driver (`simulated_cuda`), threads of a process."""

from __future__ import annotations

import threading

import torch
from torch.distributed import HashStore, PrefixStore

from ppruntime.transports import copy_engine, nccl, put
from ppruntime.transports.base import Boundary, TensorSpec, TransportError

KINDS = {"copy_engine": copy_engine, "put": put, "nccl": nccl}
SMALL = Boundary((TensorSpec("x", (3, 5), torch.float32), TensorSpec("i", (4,), torch.int32)))


def run_simulated(kind, channels, function, num_ranks=2, timeout_seconds=20.0, **options):
    """`function(rank, transport)` on every rank, in threads; the results, errors included."""
    store, results = HashStore(), {}

    def work(rank):
        try:
            transport = KINDS[kind].open(
                channels,
                rank,
                device=torch.device("cpu", rank),
                timeout_seconds=timeout_seconds,
                store=PrefixStore("test", store),
                options=options,
            )
            results[rank] = function(rank, transport)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    for error in results.values():
        if isinstance(error, BaseException) and not isinstance(error, TransportError):
            raise error
    return [results[r] for r in range(num_ranks)]
