"""Rank processes that stay run call after call, and a broken pool meets no later test."""

from __future__ import annotations

import os
import time

import pytest
import rank_pool
from rank_process import RanksFailed
from transport_cases import process_opener, random_boundary, run_order

from ppruntime.transports.base import Channel


def _process(rank, offset):
    return os.getpid(), rank + offset


def _one_fails(rank):
    if rank == 1:
        raise ValueError("as it should")
    time.sleep(60)


def _one_dies(rank):
    if rank == 0:
        os._exit(3)
    time.sleep(60)


def _sleeps(rank):
    time.sleep(60)


def _message(rank, seed):
    import random

    boundary = random_boundary(random.Random(seed))
    channel = Channel(0, "forward", 0, 1, 0, 1, boundary, slots=1)
    transport = process_opener(rank, "gloo")([channel])
    names = ["send"] if rank == 0 else ["post", "take", "release"]
    received = run_order(transport, [(name, channel, 0) for name in names], seed)
    transport.close()
    return received


def test_calls_share_processes_until_one_fails():
    first = rank_pool.run_in_pool(2, _process, 10)
    second = rank_pool.run_in_pool(2, _process, 20)
    assert [value for _, value in first + second] == [10, 11, 20, 21]
    assert [pid for pid, _ in first] == [pid for pid, _ in second]
    # Names in the shared store do not meet those of an earlier call.
    assert [rank_pool.run_in_pool(2, _message, seed) for seed in (1, 2)] == [[0, 1], [0, 1]]
    for function, text in ((_one_fails, "as it should"), (_one_dies, "exit code 3")):
        with pytest.raises(RanksFailed, match=text):
            rank_pool.run_in_pool(2, function)
        third = rank_pool.run_in_pool(2, _process, 0)
        assert not {pid for pid, _ in third} & {pid for pid, _ in first}
    with pytest.raises(RanksFailed, match="in _sleeps"):
        rank_pool.run_in_pool(2, _sleeps, timeout_seconds=1)
    rank_pool.end_pools()
