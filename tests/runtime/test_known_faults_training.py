"""Kinds of faults that other runtimes had, absent in whole runs: losses, norms, weights and
collectives of several ranks. docs/known-faults.md lists them all."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from live_memory import Recorder
from small_runs import CONFIG, SMALL, train
from torch.utils._python_dispatch import TorchDispatchMode

from ppruntime.data.token_writer import Document, Vocabulary, write
from ppruntime.metrics import read_metrics
from ppruntime.trainer import StepResult

# --- the same numbers on every rank ---------------------------------------------------------------


@contextmanager
def trainer_of(overrides: tuple[str, ...]):
    """A config, its ranks, a trainer and its data, for one rank of a started world."""
    from ppruntime.build import build_pipeline
    from ppruntime.config import load
    from ppruntime.data.batches import open_data
    from ppruntime.ranks import Layout, join, leave
    from ppruntime.trainer import Trainer

    config = load([CONFIG], [*SMALL, *overrides])
    layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
    ranks = join(layout, use_cuda=False, timeout_seconds=30)
    pipeline = build_pipeline(config, ranks)
    try:
        yield config, ranks, Trainer(config, ranks, pipeline), open_data(config)
    finally:
        dist.barrier()
        pipeline.transport.close()
        leave()


def told(result: StepResult) -> tuple[float, ...]:
    """All but the balance loss, which is a sum over stages first: at another cut it has other last
    bits. Its gradient has not."""
    return result.loss, result.grad_norm, result.lr, result.max_load


def evaluate_and_step(rank: int, overrides: tuple[str, ...]) -> list[object]:
    with trainer_of(overrides) as (_, _, trainer, data):
        found: list[object] = [trainer.evaluate(data, 1)]  # before the first step
        found += [told(trainer.step(0, data)), trainer.evaluate(data, 2)]
        found += [trainer.evaluate(data, 1), told(trainer.step(1, data))]
        return found


PLACEMENTS = {
    "one stage a rank": ("pp.size=2",),
    "a loop": ("pp.size=2", "pp.schedule=interleaved_1f1b"),
    "a V": ("pp.size=2", "pp.schedule=zb_v"),
    "two data ranks": ("pp.size=2", "parallel.dp=2", "train.num_micro_batches=3"),
}


@pytest.mark.parametrize("case", PLACEMENTS)
def test_every_rank_has_loss_norm_and_rate_also_when_evaluation_comes_first(case, run_ranks):
    overrides = PLACEMENTS[case]
    two_data_ranks = "parallel.dp=2" in overrides
    first, *others = run_ranks(4 if two_data_ranks else 2, evaluate_and_step, overrides)
    assert all(found == first for found in others)
    losses = [found if isinstance(found, float) else found[0] for found in first]
    assert all(4 < loss < 7 for loss in losses), losses
    num_micro_batches = f"train.num_micro_batches={6 if two_data_ranks else 3}"
    [alone] = run_ranks(1, evaluate_and_step, ("pp.size=1", num_micro_batches))
    for found, expected in zip(first, alone, strict=True):
        if two_data_ranks:
            assert found == pytest.approx(expected, rel=1e-5)
        else:
            assert found == expected


def losses_by_hand(rank: int) -> tuple[list[float], list[float]]:
    """The runtime's losses of three steps, and those of plain units on the same weights."""
    from ppruntime.models.carry import Carry

    with trainer_of(("pp.size=1",)) as (config, _, trainer, data):
        found, expected = [], []
        for step in range(3):
            total, num_valid = 0.0, 0
            for m in range(config.train.num_micro_batches):
                batch = data.micro_batch(step, m, 0)
                carry = Carry()
                with torch.no_grad():
                    for _, unit in trainer.pipeline.units:
                        carry = unit(carry, batch)
                total += float(carry.loss)
                num_valid += int((batch.labels != -100).sum())
            expected.append(total / num_valid)
            found.append(trainer.step(step, data).loss)
        return found, expected


def test_the_loss_is_the_summed_cross_entropy_over_the_valid_labels(run_ranks):
    [(found, expected)] = run_ranks(1, losses_by_hand)
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(found)) == 3


# --- masked tokens and accumulation ---------------------------------------------------------------


@pytest.fixture(scope="module")
def masked_data(tmp_path_factory):
    """Documents most of whose tokens are not learnt, some of them not at all."""
    rng = np.random.default_rng(4)
    documents = [
        Document(rng.integers(0, 256, n), rng.random(n) < share)
        for n, share in zip(rng.integers(5, 60, 80), rng.choice([0.0, 0.1, 0.9], 80), strict=True)
    ]
    prefix = tmp_path_factory.mktemp("data") / "masked"
    write(prefix, documents, Vocabulary("byte", 256))
    return (
        "data.type=tokens",
        f"data.path={prefix}",
        "train.steps=2",
        "train.eval_interval=default",
    )


@pytest.mark.parametrize(
    ("num_ranks", "layout"),
    [
        (2, ("pp.size=2", "train.num_micro_batches=4")),
        (4, ("pp.size=2", "parallel.dp=2", "train.num_micro_batches=2")),
    ],
)
def test_with_masked_tokens_loss_and_norm_are_those_of_one_rank(
    num_ranks, layout, masked_data, tmp_path, run_ranks
):
    results = run_ranks(num_ranks, train, str(tmp_path / "run"), (*masked_data, *layout))
    assert [code for code, _, _ in results] == [0] * num_ranks, results
    one = ("pp.size=1", "train.num_micro_batches=4")
    run_ranks(1, train, str(tmp_path / "one"), (*masked_data, *one))
    steps, expected = (read_metrics(tmp_path / d / "metrics.jsonl") for d in ("run", "one"))
    tolerance = 1e-6 if "parallel.dp=2" in layout else 0.0
    for step, other in zip(steps, expected, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=tolerance, abs=0)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=10 * tolerance, abs=0)


def losses_at(
    rank: int, num_micro_batches: int, micro_batch_size: int
) -> tuple[float, float, float]:
    overrides = (
        "pp.size=2",
        f"train.num_micro_batches={num_micro_batches}",
        f"train.micro_batch_size={micro_batch_size}",
    )
    with trainer_of(overrides) as (_, _, trainer, data):
        validation = trainer.evaluate(data, 2)
        step = trainer.step(0, data)
        return validation, step.loss, step.grad_norm


def test_accumulation_changes_neither_training_nor_validation_loss_nor_norm(run_ranks):
    reference, *others = (run_ranks(2, losses_at, 4 // size, size)[0] for size in (1, 2, 4))
    for other in others:
        assert other == pytest.approx(reference, rel=1e-5)


# --- collectives ----------------------------------------------------------------------------------


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(rank: int, overrides: tuple[str, ...]):
    """Of one step, of the order alone, and of gathers and reductions per unit."""
    with trainer_of(overrides) as (_, _, trainer, data):
        trainer.step(0, data)
        run = trainer.pipeline.training.run
        inside = Collectives()

        def counted(batches, **options):
            with inside:
                run(batches, **options)

        trainer.pipeline.training.run = counted
        with Collectives() as whole:
            trainer.step(1, data)
        return dict(whole.counts), dict(inside.counts), len(trainer.pipeline.units)


@pytest.mark.parametrize("schedule", ["1f1b_w", "interleaved_1f1b", "dualpipe_v"])
def test_a_step_has_three_collectives_after_its_order_and_none_within(schedule, run_ranks):
    overrides = ("pp.size=2", f"pp.schedule={schedule}")
    for whole, inside, _ in run_ranks(2, collectives_of_a_step, overrides):
        assert inside == {}
        assert whole == {"allreduce_": 3}  # losses, squares of norms, loads of experts


@pytest.mark.parametrize("schedule", ["zb_v"])
def test_with_fsdp_a_unit_is_gathered_and_reduced_once_a_step(schedule, run_ranks):
    overrides = ("pp.size=2", "parallel.dp=2", f"pp.schedule={schedule}")
    # Each pipeline rank has an Engram: counts and numbers of rows once, then of each of the three
    # micro-batches rows and gradients.
    rows = {"send": 2 + 2 * 3, "recv_": 2 + 2 * 3}
    for whole, inside, num_units in run_ranks(4, collectives_of_a_step, overrides):
        assert inside == {"_allgather_base_": num_units, **rows}
        assert whole["_reduce_scatter_base_"] == num_units
        assert whole["_allgather_base_"] == num_units


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_experts_gradients_are_reduced_by_themselves_and_once_a_step(num_micro_batches, run_ranks):
    """Over the data ranks that have the same experts."""
    num_layers = 8  # with experts each
    overrides = ("pp.size=1", "parallel.dp=2", "parallel.ep=2")
    more = f"train.num_micro_batches={num_micro_batches}"
    for whole, inside, num_units in run_ranks(4, collectives_of_a_step, (*overrides, more)):
        assert whole["_reduce_scatter_base_"] == num_units + num_layers
        assert "_reduce_scatter_base_" not in inside
        assert inside["_allgather_base_"] == num_units + num_layers


# --- initial weights ------------------------------------------------------------------------------


def initial_weights(rank: int, overrides: tuple[str, ...]) -> tuple[dict, int]:
    """This rank's weights, and the most bytes that were alive at once while they were made."""
    from ppruntime.build import build_stage
    from ppruntime.config import load
    from ppruntime.order import make_order
    from ppruntime.plan import cut
    from ppruntime.ranks import Layout, join, leave

    config = load([CONFIG], [*SMALL, *overrides])
    ranks = join(Layout(config.pp.size, 1, 1), use_cuda=False, timeout_seconds=30)
    placement = make_order(config).computations.stage_to_rank
    plan = cut(config.model.dims, placement, config.pp.layers_per_stage, seq_len=16)
    recorder = Recorder(samples_every_op=True)
    with recorder:
        stages = [build_stage(config, s, ranks) for s in plan if s.rank == rank]
    weights = {
        f"{spec.name}.{name}": value.detach()
        for stage in stages
        for spec, unit in zip(plan[stage.index].units, stage.units, strict=True)
        for name, value in unit.named_parameters()
    }
    leave()
    return weights, recorder.peak_bytes


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (2, ("pp.size=2", "pp.schedule=zb_v")),
        (4, ("pp.size=4", "pp.layers_per_stage=[0.5, 3.5, 1.5, 2.5]")),
    ],
)
def test_initial_weights_are_those_of_one_rank_and_no_rank_holds_more_than_its_own(
    num_ranks, overrides, run_ranks
):
    [(expected, all_bytes)] = run_ranks(1, initial_weights, ("pp.size=1",))
    found: dict[str, torch.Tensor] = {}
    for weights, peak_bytes in run_ranks(num_ranks, initial_weights, overrides):
        own = sum(w.numel() * w.element_size() for w in weights.values())
        largest = max(w.numel() * w.element_size() for w in weights.values())
        assert peak_bytes <= own + 6 * largest + 100_000, "more than its own and one tensor's draws"
        assert peak_bytes < all_bytes
        found |= weights
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- a pending receive and a collective -----------------------------------------------------------


def collective_beside_a_receive(rank: int) -> float:
    from ppruntime.transports import open_transport
    from ppruntime.transports.base import Boundary, Channel, TensorSpec

    dist.init_process_group("gloo")
    boundary = Boundary((TensorSpec("x", (1 << 16,), torch.float32),))
    channels = tuple(
        Channel(
            id=i, kind=kind, src_rank=i, dst_rank=1 - i, src_stage=i, dst_stage=1 - i,
            boundary=boundary, slots=1,
        )
        for i, kind in enumerate(("forward", "backward"))
    )  # fmt: skip
    transport = open_transport(
        "gloo",
        channels,
        rank,
        device=torch.device("cpu"),
        timeout_seconds=20,
        store=dist.PrefixStore("t", dist.distributed_c10d._get_default_store()),
    )
    transport.post(channels[1 - rank], 0)  # what is awaited is sent after the collectives
    total = torch.ones(1)
    for _ in range(3):
        dist.all_reduce(total)
    transport.send(channels[rank], 0, (torch.full((1 << 16,), float(rank)),))
    [came] = transport.take(channels[1 - rank], 0)
    value = float(came[0])
    transport.release(channels[1 - rank], 0)
    transport.step_end()
    dist.barrier()
    transport.close()
    assert float(total) == 8
    return value


def test_collectives_go_on_while_a_receive_is_pending_on_both_ranks(run_ranks):
    assert run_ranks(2, collective_beside_a_receive) == [1.0, 0.0]
