"""docs/known-faults.md is true: its tests exist. And the faults that show in time alone."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ppruntime.schedules import make
from ppruntime.schedules.costs import Costs
from ppruntime.sleep_rig import SleepRig

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "known-faults.md"
NUM_FAULTS = 56


def rows() -> list[tuple[int, str, str]]:
    """(number, kind, what proves it absent) of each row of the table."""
    lines = re.findall(r"^\| *(\d+) \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [(int(number), kind, proof) for number, kind, proof in lines]


def test_every_fault_has_a_row_with_a_test_or_a_reason():
    assert [number for number, _, _ in rows()] == list(range(1, NUM_FAULTS + 1))
    for number, kind, proof in rows():
        assert len(kind) > 10, number
        assert "`" in proof or proof.startswith("not yet: ") or proof.startswith("n/a: "), number


def test_every_test_that_a_row_names_exists():
    named = {name for _, _, proof in rows() for name in re.findall(r"`(test_\w+)`", proof)}
    assert len(named) > 40
    sources = (path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    defined = {name for text in sources for name in re.findall(r"^def (test_\w+)\(", text, re.M)}
    assert named - defined == set()


def first_forwards(rank: int, names: tuple[str, ...], op_seconds: float) -> list[float]:
    """When this rank's first forward began, in seconds after the step's start, per order."""
    dist.init_process_group("gloo")
    found = []
    for number, name in enumerate(names):
        schedule = make(name, dist.get_world_size(), 3)
        rig = SleepRig(schedule, PrefixStore(str(number), _get_default_store()))
        costs = Costs.even(op_seconds, op_seconds, op_seconds, schedule.stage_to_rank)
        waits = []
        for _ in range(3):  # the least of three: other work on the machine only adds
            step = rig.step(costs, op_seconds / 2)
            first = next(t for t in step.times if t.op == f"{rank}F0")
            waits.append(first.ready / 1e9 - step.start)
        found.append(min(waits))
        rig.close()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_the_first_forward_of_a_rank_waits_for_the_forwards_before_it_and_for_nothing_else(
    run_ranks,
):
    names = ("1f1b", "async_1f1b", "zb_h1")
    for op_seconds in (0.02, 0.08):  # a busy machine wakes sleepers late: then the smaller share
        of_ranks = run_ranks(4, first_forwards, names, op_seconds)
        hop = op_seconds + op_seconds / 2
        late = [
            (name, rank, seconds)
            for rank, found in enumerate(of_ranks)
            for name, seconds in zip(names, found, strict=True)
            if seconds > 1.05 * rank * hop + 0.1 * op_seconds
        ]
        if not late:
            break
    assert late == []
