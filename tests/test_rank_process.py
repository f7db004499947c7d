"""The harness of the multi-process tests shows failures, deaths and hangs."""

from __future__ import annotations

import os
import signal
import threading
import warnings

import pytest
import torch
import torch.distributed as dist


def _sum_over_ranks(rank, offset):
    dist.init_process_group("gloo")
    x = torch.full((3,), float(rank + offset))
    dist.all_reduce(x)
    assert torch.get_num_threads() == 1
    return x


def _one_raises(rank):
    if rank == 1:
        raise ValueError("rank 1 has an odd day")
    return rank


def _one_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def _one_hangs(rank):
    if rank == 1:
        threading.Event().wait()
    return rank


def _warns(rank, text, category):
    warnings.warn(text, category, stacklevel=1)
    return rank


def test_ranks_take_warnings_as_tests_do(run_ranks, rank_outcomes):
    told = "`torch.jit.script_method` is deprecated. Please switch to `torch.compile`."
    assert run_ranks(1, _warns, told, DeprecationWarning) == [0]
    (failed,) = rank_outcomes(1, _warns, "something new is deprecated", DeprecationWarning)
    assert isinstance(failed.error, DeprecationWarning)


def test_ranks_form_a_process_group_and_results_come_in_rank_order(run_ranks):
    results = run_ranks(3, _sum_over_ranks, 10)
    assert [r.tolist() for r in results] == [[33.0] * 3] * 3


def test_an_error_on_one_rank_fails_the_test_with_its_traceback(run_ranks, rank_outcomes):
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2.*_one_raises.*odd day"):
        run_ranks(2, _one_raises)
    fine, failed = rank_outcomes(2, _one_raises)
    assert (fine.value, fine.error) == (0, None)
    assert isinstance(failed.error, ValueError)


def test_a_rank_that_dies_is_told_from_one_that_raises(rank_outcomes):
    fine, dead = rank_outcomes(2, _one_dies)
    assert fine.value == 0
    assert (dead.error, dead.exit_code) == (None, -signal.SIGKILL)


def test_a_hanging_rank_is_killed_in_time_and_its_stack_is_shown(run_ranks):
    with pytest.raises(AssertionError, match=r"(?s)no result after 5 s.*_one_hangs"):
        run_ranks(2, _one_hangs, timeout_seconds=5)
