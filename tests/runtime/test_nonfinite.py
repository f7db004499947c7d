"""A step that is not finite on one rank is skipped by all, or ends the run with nothing damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from bad_steps import spoil
from holdings import Holdings, assert_no_more, holdings
from memory_knobs import BF16, IN_BACKWARD, MASTERS, ORDERS, PACED, RECOMPUTED, SHALLOW, SIGNS
from small_runs import CONFIG, SMALL, train

from ppruntime.manifest import check_files, find, read_state
from ppruntime.metrics import read_metrics

SKIP = ("fault.nonfinite=skip",)
WHOLE = (
    "pp.size=1",
    "pp.layers_per_stage=default",
    "checkpoint.interval=1",
    "checkpoint.keep_last=9",
)
BIAS = ("train.routing_bias_rate=1e-3",)


def trains(
    rank: int, run_dir: str, starts: tuple[tuple[frozenset[int], tuple[str, ...]], ...]
) -> list[tuple[int, str, str]]:
    """One start after another: the steps that are spoilt, and overrides."""
    found = []
    for steps, overrides in starts:
        spoil(rank, steps, 0)
        found.append(train(rank, run_dir, (*WHOLE, *overrides)))
    return found


def contents(run_dir: Path) -> list[dict[str, str]]:
    """By checkpoint, digests of its tensors, from files that are what was committed."""
    found = []
    for path in find(run_dir / "ckpt").committed:
        check_files(path)
        tensors = {}
        for file in path.glob("*.safetensors"):
            content = file.read_bytes()
            start = 8 + int.from_bytes(content[:8], "little")
            for name, entry in json.loads(content[8:start]).items():
                if name != "__metadata__":
                    first, end = entry["data_offsets"]
                    data = content[start + first : start + end]
                    tensors[name] = hashlib.sha256(data).hexdigest()
        found.append(tensors)
    return found


def test_skipped_steps_change_nothing_and_one_too_many_ends_the_run_also_after_a_resume(
    tmp_path, run_ranks
):
    run_dir = tmp_path / "run"
    skip = (*SKIP, *BIAS, "fault.nonfinite_max=1", "train.steps=3")
    starts = ((frozenset({1, 2}), skip), (frozenset({2}), skip), (frozenset(), skip))
    ((first, again, last),) = run_ranks(1, trains, str(run_dir), starts)
    assert first[0] == again[0] == 12
    assert last[0] == 0
    assert "skipped the update of step 2, 1 of 1 allowed in a row: loss " in first[1]
    for _, _, error in (first, again):
        assert "step 3: the gradient norm is nan, as in the step before it" in error
        assert "fault.nonfinite_max = 1 allows no more" in error
        assert "still those of step 1" in error
    one, two, three = contents(run_dir)
    assert one == two
    assert any(two[name] != three[name] for name in two if name.endswith("router.bias"))
    assert all(two[name] != three[name] for name in two if name.startswith("optim.step."))
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert [step.skipped_in_a_row for step in steps] == [0, 1, 0]
    assert [step.grad_norm is None for step in steps] == [False, True, False]
    state = read_state(run_dir / "ckpt" / "step-00000003")
    assert (state.skipped, state.skipped_in_a_row) == (1, 0)
    assert state.data_cursor == 3 * 3, "a skipped step's data is not read again"


def test_updates_in_the_backward_end_the_run_before_anything_damaged_is_saved(tmp_path, run_ranks):
    run_dir, straight = tmp_path / "run", tmp_path / "straight"
    knobs = (*SIGNS, *IN_BACKWARD, "train.steps=2")
    starts = ((frozenset({1}), knobs), (frozenset(), knobs))
    (((code, _, error), (last, *_)),) = run_ranks(1, trains, str(run_dir), starts)
    assert (code, last) == (12, 0)
    assert "the weights have moved in the backward already and are not saved" in error
    assert "it goes on from step-00000001" in error
    run_ranks(1, trains, str(straight), ((frozenset(), knobs),))
    assert contents(run_dir) == contents(straight)


@dataclass(frozen=True)
class Skipped:
    """Of a rank's good, two bad and a good step."""

    states: list[str]
    """Digests of all that a checkpoint would hold."""
    in_a_row: list[int]
    held: list[Holdings]
    """After the second and the fourth."""


def skips_of_each(
    rank: int, layout: tuple[int, int, int], cases: Mapping[str, tuple[str, ...]]
) -> dict[str, Skipped]:
    """What came of each case."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data.batches import open_data
    from ppruntime.ranks import Layout, Ranks, join, leave
    from ppruntime.trainer import Trainer

    ranks = join(Layout(*layout), use_cuda=False, timeout_seconds=60)
    spoil(rank, {1, 2}, of_rank=ranks.layout.world - 1)
    found = {}
    for number, (name, overrides) in enumerate(cases.items()):
        # One start stands for many: each has keys of its own in the store.
        Ranks.world_store = lambda _, key, n=number: PrefixStore(  # type: ignore[method-assign]
            f"{n} {key}", _get_default_store()
        )
        pp, dp, ep = layout
        sizes = (f"pp.size={pp}", f"parallel.dp={dp}", f"parallel.ep={ep}")
        config = load(
            [CONFIG], [*SMALL, "train.num_micro_batches=2", *SKIP, *BIAS, *sizes, *overrides]
        )
        pipeline = build_pipeline(config, ranks)
        trainer, data = Trainer(config, ranks, pipeline), open_data(config)
        states, counts, held = [], [], []
        for index in range(4):
            counts.append(trainer.step(index, data).skipped_in_a_row)
            states.append(_digest(trainer.state_tensors()))
            assert all(p.grad is None for p in pipeline.params.values()), "a gradient is left"
            held.append(holdings(pipeline.host_pool.num_bytes))
        found[name] = Skipped(states, counts, [held[1], held[3]])
        torch.distributed.barrier()
        pipeline.transport.close()
    leave()
    return found


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        local = getattr(tensors[name], "_local_tensor", tensors[name])
        total.update(name.encode() + local.detach().clone().numpy().tobytes())
    return total.hexdigest()


CASES = {
    "adamw": ("optim.clip_norm=1.0",),
    "sign": SIGNS,
    "bf16, masters": (*BF16, *MASTERS),
    "bf16, masters, sign": (*BF16, *MASTERS, *SIGNS),
}


EVERYTHING = (*SHALLOW, *BF16, *MASTERS, *PACED, *RECOMPUTED, *ORDERS["1f1b"])
FOUR = ("train.num_micro_batches=4",)


def assert_all_skip(found: list[dict[str, Skipped]]) -> None:
    for rank, cases in enumerate(found):
        for name, run in cases.items():
            assert run.in_a_row == [0, 1, 2, 0], (rank, name)
            first, second, third, last = run.states
            assert first == second == third != last, (rank, name)
            assert_no_more(*run.held)


def test_what_is_not_finite_on_one_rank_is_skipped_by_all_and_four_steps_leave_nothing(run_ranks):
    found = run_ranks(2, skips_of_each, (2, 1, 1), {"": (*EVERYTHING, *FOUR)}, timeout_seconds=280)
    assert_all_skip(found)
    assert found[0][""].held[0].host_bytes > 32 << 20, "masters, and activations too"


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (2, 1, 2)])
def test_steps_are_skipped_by_all_ranks_of_any_layout_with_any_optimizer(layout, run_ranks):
    num_ranks = layout[0] * layout[1] * layout[2]
    found = run_ranks(num_ranks, skips_of_each, layout, CASES, timeout_seconds=800)
    assert all(len(cases) == len(CASES) for cases in found)
    assert_all_skip(found)
