"""What all tests share: hypothesis profiles, and functions that run once per rank.

HYPOTHESIS_PROFILE picks a profile: `ci` (60 examples, the default) or `deep` (2,000).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import cache
from pathlib import Path

# One thread, here and in every process of a rank: sums come in one order, so bitwise tests mean
# something, and eight ranks share two cores without fighting. torch reads it when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A bare checkout is importable, and so is the file that the processes of ranks start with.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import pytest  # noqa: E402 (after the lines above)
import rank_process  # noqa: E402
import small_runs  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# Without a GPU kernels run in Triton's interpreter. It is asked for before any file loads a kernel,
# as Triton looks once.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "ci", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("deep", settings.get_profile("ci"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: `make test` hands out whole files, and one that takes minutes
    must not be the last."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(num_ranks, function, *args, timeout_seconds=120)` -> results in rank order.

    Runs `function(rank, *args)` in one process per rank; raises with all tracebacks if one fails.
    In the processes `torch.distributed.init_process_group("gloo")` needs no further argument.
    """
    return rank_process.run_ranks


@pytest.fixture(scope="session")
def rank_outcomes():
    """As `run_ranks`, but gives an `Outcome` (value, error, error_text, exit_code, seconds) per
    rank and raises nothing: for tests in which ranks are meant to fail or to die."""
    return rank_process.rank_outcomes


@pytest.fixture(scope="session")
def gpu_steps(tmp_path_factory):
    """`gpu_steps(num_ranks, *overrides)` -> the steps of a small run on one GPU or two. All tests
    that ask for the same run share it."""

    @cache
    def steps(num_ranks: int, *overrides: str):
        return small_runs.steps_on_gpus(num_ranks, tmp_path_factory.mktemp("run"), overrides)

    return steps
