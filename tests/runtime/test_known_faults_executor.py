"""Kinds of faults that other runtimes had, absent in stage and executor: on every order, against
plain autograd in one process. docs/known-faults.md lists them all."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from live_memory import Recorder
from pipelines import BALANCE_SEED, LOSS_SEED, run_local, toy_boundaries, toy_stages
from torch import Tensor, nn
from torch.nn import functional
from toy_units import WIDTH, Embed, Half, Head, live_after, micro_batches, toy_units

from ppruntime.channels import make_channels
from ppruntime.clocks import HostClock
from ppruntime.executor import Executor
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.schedules import NAMES, make
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.forward_only import forward_only
from ppruntime.schedules.ops import Schedule
from ppruntime.schedules.passes import add_frees, add_transfers, split_backward
from ppruntime.stage import Stage
from ppruntime.transports.local import open_ranks
from ppruntime.wrap import checkpoint_unit

M = 5
PLACEMENTS = ("1f1b_w", "interleaved_1f1b", "zb_v")
"""One order for each placement of stages on ranks; where a fault lies in the stage alone, these do.
Any order is swept in test_executor.py."""


def lower(name: str, num_ranks: int, num_micro_batches: int, *, split: bool = True):
    """The order with transfers and frees, and its slots; backwards split unless told not to."""
    schedule = make(name, num_ranks, num_micro_batches)
    slots = slots_held(schedule)
    if split:
        schedule = split_backward(schedule)
    return add_frees(add_transfers(schedule, slots=slots)), slots


def cut(units: Sequence[nn.Module], live: Sequence[tuple[str, ...]], num_stages: int):
    """Stages of about as many units each; a stage may be empty."""
    stages, start = [], 0
    for index in range(num_stages):
        end = len(units) * (index + 1) // num_stages
        queue = WeightGradQueue()
        for unit in units[start:end]:
            set_queue(unit, queue)
        inputs = live[start - 1] if start else ()
        outputs = live[end - 1] if end else ()
        assert start or end, "the first stage has the embedding"
        stages.append(Stage(index, units[start:end], inputs=inputs, outputs=outputs, queue=queue))
        start = end
    return stages


def one_process(units: Sequence[nn.Module], batches: Sequence[Any]) -> list[Tensor]:
    """Losses by plain autograd; gradients are left in the units."""
    losses = []
    for batch in batches:
        carry = Carry()
        for unit in units:
            carry = unit(carry, batch)
        roots = [t for t in (carry.balance_loss, carry.loss) if t is not None]
        seeds = [BALANCE_SEED, LOSS_SEED][-len(roots) :]
        torch.autograd.backward(roots, seeds)
        losses.append(carry.loss.detach())
    return losses


def assert_bitwise_like_one_process(
    name: str,
    make_units: Callable[[], list[nn.Module]],
    live: Sequence[tuple[str, ...]],
    batches: Sequence[Any],
    *,
    num_ranks: int = 2,
    prepare: Callable[[Stage], None] = lambda stage: None,
) -> None:
    expected = make_units()
    losses = one_process(expected, batches)
    lowered, slots = lower(name, num_ranks, len(batches))
    stages = cut(make_units(), live, lowered.num_stages)
    for stage in stages:
        prepare(stage)
    run_local(lowered, stages, batches, slots)
    assert all(map(torch.equal, stages[-1].losses, losses))
    found = [p for stage in stages for p in stage.units.parameters()]
    wanted = [p for unit in expected for p in unit.parameters()]
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in wanted)
    for p, q in zip(found, wanted, strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


# --- outputs that are views, slices or come from custom functions ---------------------------------


class Doubled(torch.autograd.Function):
    """Gives its input back as a view, marks it as changed by nothing, and scales its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Odd(Half):
    """A half whose outputs are what a runtime might stumble over."""

    def __init__(self, index: int, way: str) -> None:
        super().__init__(index)
        self.way = way
        self.down.register_full_backward_pre_hook(lambda module, grads: None)

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        carry = super().forward(carry, batch)
        streams, mix = carry.streams, carry.mix
        assert streams is not None
        assert mix is not None
        match self.way:
            case "a view":
                return carry._replace(streams=streams.view_as(streams), mix=mix[:])
            case "a slice of something larger":
                wide = torch.cat([streams, streams * 3], dim=-1)
                return carry._replace(streams=wide[..., :WIDTH])
            case "a transposed view":
                return carry._replace(streams=streams.transpose(0, 1).transpose(0, 1).mT.mT)
            case "a custom function's output":
                return carry._replace(streams=Doubled.apply(streams), mix=Doubled.apply(mix))
            case "an expanded tensor":
                return carry._replace(mix=mix.mean(-1, keepdim=True).expand_as(mix))
            case "parts of one chunk, unequally used":
                both = torch.stack([streams, streams.sin()])
                first, second = both.chunk(2)
                return carry._replace(streams=first[0] + 0.25 * second[0], mix=mix * 0.5)
        raise AssertionError(self.way)


WAYS = (
    "a view",
    "a slice of something larger",
    "a transposed view",
    "a custom function's output",
    "an expanded tensor",
    "parts of one chunk, unequally used",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_stage_may_hand_on_views_slices_and_outputs_of_custom_functions(name, way):
    def units() -> list[nn.Module]:
        torch.manual_seed(5)
        return [Embed(), *(Odd(i, way) for i in range(6)), Head()]

    assert_bitwise_like_one_process(name, units, live_after(8), micro_batches(M, 2, 4, seed=2))


class Splitter(nn.Module):
    """Makes two crossing fields by one split: a gradient of one must not go to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        wide = functional.linear(carry.streams, self.weight)
        streams, kv = wide.split(WIDTH, dim=-1)
        return carry._replace(streams=streams, kv=kv)


class Joiner(nn.Module):
    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        assert carry.kv is not None
        return carry._replace(streams=carry.streams + 0.125 * carry.kv.cos())


@pytest.mark.parametrize("name", PLACEMENTS)
def test_parts_of_one_split_that_cross_as_two_fields_get_a_gradient_each(name):
    def units() -> list[nn.Module]:
        torch.manual_seed(6)
        return [Embed(), Splitter(), Joiner(), Head()]

    live = [("streams", "mix"), ("streams", "mix", "kv"), ("streams", "mix", "kv"), ()]
    assert_bitwise_like_one_process(name, units, live, micro_batches(M, 2, 4, seed=2))


# --- what crosses beside floats with gradients ----------------------------------------------------


class Sources(nn.Module):
    """Makes one field of each kind: a float without gradient, integers, nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        return carry._replace(
            index_keys=carry.streams.detach().sum(2) * self.frozen,
            slots=batch.ids.to(torch.int32).unsqueeze(-1),
            candidates=torch.zeros(*batch.ids.shape, 0, dtype=torch.bool),
            kv=torch.ones(batch.ids.shape[0], 0, WIDTH),  # differentiable by name, and empty
        )


class Reader(nn.Module):
    """Reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        assert carry.index_keys is not None
        assert carry.slots is not None
        assert carry.candidates is not None
        assert carry.kv is not None
        assert carry.candidates.numel() == carry.kv.numel() == 0
        add = carry.index_keys * self.scale + carry.slots.float().cos() + carry.kv.sum()
        return carry._replace(streams=carry.streams + add.unsqueeze(2))


@pytest.mark.parametrize("name", NAMES)
def test_integers_frozen_floats_and_empty_tensors_cross_like_any_other(name):
    def units() -> list[nn.Module]:
        torch.manual_seed(7)
        return [Embed(), Sources(), Reader(), Reader(), Head()]

    crossing = ("streams", "mix", "kv", "index_keys", "slots", "candidates")
    live = [("streams", "mix"), crossing, crossing, ("streams", "mix"), ()]
    assert_bitwise_like_one_process(name, units, live, micro_batches(M, 2, 4, seed=2))


class Mask:
    """Neither a tensor nor made of tensors that anyone could find."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class MaskedBatch(NamedTuple):
    ids: Tensor
    labels: Tensor
    positions: Tensor
    mask: Mask
    note: str = "as it is"


class MaskReader(Half):
    def forward(self, carry: Carry, batch: Any) -> Carry:
        assert batch.note == "as it is"
        carry = super().forward(carry, batch)
        assert carry.streams is not None
        return carry._replace(streams=carry.streams * batch.mask.factor)


@pytest.mark.parametrize("name", NAMES)
def test_any_object_may_come_with_a_micro_batch(name):
    def units() -> list[nn.Module]:
        torch.manual_seed(8)
        return [Embed(), *(MaskReader(i) for i in range(4)), Head()]

    batches = [
        MaskedBatch(b.ids, b.labels, b.positions, Mask(1 + m / 8))
        for m, b in enumerate(micro_batches(M, 2, 4, seed=2))
    ]
    assert_bitwise_like_one_process(name, units, live_after(6), batches)


# --- weight gradients -----------------------------------------------------------------------------


class Immediate(nn.Module):
    """A half with weights none of which can wait."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        return carry._replace(streams=functional.linear(carry.streams, self.weight).sin())


class Weightless(nn.Module):
    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        return carry._replace(streams=carry.streams.sin())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [Immediate, Weightless])
def test_stages_whose_weight_gradients_cannot_wait_or_do_not_exist_work_with_every_split(
    name, kind
):
    def units() -> list[nn.Module]:
        torch.manual_seed(9)
        return [Embed(), *(kind() for _ in range(6)), Head()]

    live = [("streams", "mix")] * 7 + [()]
    assert_bitwise_like_one_process(name, units, live, micro_batches(M, 2, 4, seed=2))


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_stages_have_the_bits_of_one_process_on_every_order(name):
    def recompute(stage: Stage) -> None:
        for unit in stage.units:
            if isinstance(unit, Half):
                checkpoint_unit(unit)

    assert_bitwise_like_one_process(
        name,
        lambda: toy_units(6, 4),
        live_after(8),
        micro_batches(M, 2, 4, seed=2),
        prepare=recompute,
    )


# --- train and evaluate over one set of channels --------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_evaluations_alternate_in_any_order_on_the_same_channels(name):
    schedule = make(name, 2, M)
    slots = slots_held(schedule)
    lowered = add_frees(add_transfers(schedule, slots=slots))
    batches = micro_batches(M, 1, 4, seed=2)
    reference = toy_units(6, 4)
    losses = one_process(reference, batches)
    stages = cut(toy_units(6, 4), live_after(8), lowered.num_stages)
    plan = (False, True, False, False, True, True, False)

    def reset() -> None:
        for stage in stages:
            stage.reset(loss_seed=LOSS_SEED, balance_seed=BALANCE_SEED)

    reset()
    channels = make_channels(toy_boundaries(stages, batches[0]), lowered.stage_to_rank, slots)
    transports = open_ranks(channels, 2, device=torch.device("cpu"), timeout_seconds=20)
    found: list[list[Tensor]] = []

    def between() -> None:
        if stages[-1].losses:
            found.append(stages[-1].losses)
        reset()

    turn = threading.Barrier(2, action=between, timeout=20)
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        own = {s: stages[s] for s in lowered.stages_of(rank)}

        def executor(order: Schedule, *, training: bool) -> Executor:
            parts = (order, rank, own, channels, transports[rank])
            return Executor(*parts, clock=HostClock(), training=training)

        kinds = {
            True: executor(lowered, training=True),
            False: executor(forward_only(schedule), training=False),
        }
        try:
            for training in plan:
                turn.wait()
                kinds[training].run(batches)
            turn.wait()
        except BaseException as error:
            errors.append(error)
            turn.abort()

    reset()
    for stage in stages:
        stage.losses.clear()
    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(found) == len(plan)
    for step in found:
        assert all(map(torch.equal, step, losses))
    for p, q in zip(
        (p for stage in stages for p in stage.units.parameters()),
        (q for unit in reference for q in unit.parameters()),
        strict=True,
    ):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, sum(plan) * q.grad, rtol=1e-5, atol=1e-7)


# --- memory ---------------------------------------------------------------------------------------


class Recorded:
    """A stage whose new tensors are counted. `after` has the live bytes after each of its ops."""

    def __init__(self, stage: Stage, *, samples_every_op: bool) -> None:
        self._stage = stage
        self.recorder = Recorder(samples_every_op=samples_every_op)
        self.after: list[int] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._stage, name)
        if name not in ("forward", "backward", "backward_input", "weight_grads"):
            return found

        def recorded(*args: Any) -> Any:
            with self.recorder:
                out = found(*args)
            self.after.append(self.recorder.sample())
            return out

        return recorded


def recorded_run(
    name: str, num_micro_batches: int, *, split: bool = False, recompute: bool = False
) -> list[Recorded]:
    """One step of three ranks."""
    lowered, slots = lower(name, 3, num_micro_batches, split=split)
    stages = cut(toy_units(6, 4), live_after(8), lowered.num_stages)
    for unit in (unit for stage in stages for unit in stage.units):
        for p in unit.parameters():
            p.grad = torch.zeros_like(p)  # so that sums are no new memory
        if recompute and isinstance(unit, Half):
            checkpoint_unit(unit)
    recorded = [Recorded(stage, samples_every_op=recompute) for stage in stages]
    gc.collect()
    gc.disable()  # what the run needs a collector for counts as live
    try:
        run_local(lowered, recorded, micro_batches(num_micro_batches, 2, 16, seed=1), slots)  # type: ignore[arg-type]
    finally:
        gc.enable()
    return recorded


LOSSES_BYTES = 64 * 2 * 4
"""Losses and balance losses of 64 micro-batches, which stay until the next step."""
BOUNDARY_BYTES = 2 * 16 * (2 * WIDTH + 2 + WIDTH + 1) * 4
ON_THE_WAY = 2 * 3
"""Boundaries that were sent and not taken yet; how many there are is a matter of timing."""


@pytest.mark.parametrize("name", PLACEMENTS)
def test_memory_of_64_micro_batches_is_that_of_the_micro_batches_in_flight(name):
    few, many = recorded_run(name, 12), recorded_run(name, 64)
    slack = ON_THE_WAY * BOUNDARY_BYTES + LOSSES_BYTES
    for a, b in zip(few, many, strict=True):
        assert b.recorder.peak_bytes <= a.recorder.peak_bytes + slack
    assert slots_held(make(name, 3, 64)) == slots_held(make(name, 3, 34)), "buffers grow with M"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", ["gpipe", *PLACEMENTS])
def test_activations_are_free_after_the_last_backward(name, split):
    for stage in recorded_run(name, 4, split=split):
        assert max(stage.after) > LOSSES_BYTES
        assert stage.recorder.sample() <= LOSSES_BYTES


def operand_bytes(stage: Recorded) -> int:
    """What one micro-batch's put-off weight gradients read: input and output gradient of each."""
    widths = (sum(p.shape) for unit in stage.units for p in unit.parameters() if p.ndim == 2)
    return 2 * 16 * sum(widths) * 4


def test_split_backwards_with_recomputation_cost_no_more_than_the_stated_operands():
    whole = recorded_run("1f1b", 12, recompute=True)
    split = recorded_run("1f1b_w", 12, recompute=True)
    for a, b in zip(whole, split, strict=True):
        slack = ON_THE_WAY * BOUNDARY_BYTES
        assert b.recorder.peak_bytes <= 1.1 * a.recorder.peak_bytes + operand_bytes(b) + slack


def test_the_toy_model_of_these_tests_is_cut_at_every_kind_of_boundary():
    fields = {field for stage in toy_stages(6, [0, 1, 3, 5], 1) for field in stage.outputs}
    assert fields == {"streams", "mix", "kv", "slots"}
