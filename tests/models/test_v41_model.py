"""Whole V4.1 models: documents, bits that must not move, and numbers of another implementation."""

import json

import pytest
import torch
from msgspec.structs import replace
from nemo_cases import CASES, GOLDEN
from torch.utils.checkpoint import checkpoint
from whole_model import (
    build_units,
    mean_loss,
    named_grads,
    random_batch,
    run,
    run_to_logits,
)

from ppruntime.models.carry import CROSSING, Carry, MicroBatch
from ppruntime.models.dims import carry_shape, preset, unit_specs
from ppruntime.models.init import fill_normal, init_parameters
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.units import build_unit

TINY = preset("tiny")
golden = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_logits_and_gradients_are_those_of_nemo_automodel(case):
    expected = golden[case.name]
    units, batch = case.units(), case.batch()
    logits = run_to_logits(units, batch)
    loss = mean_loss(units, batch)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    assert logits[-1, -1, :8].tolist() == pytest.approx(expected["logits"], rel=1e-3, abs=1e-4)
    assert logits.norm().item() == pytest.approx(expected["logits_norm"], rel=case.logits_bound)
    norms = {name: grad.norm().item() for name, grad in named_grads(units).items()}
    assert norms == pytest.approx(expected["grad_norms"], rel=case.grads_bound)


ROWS = [(13, 1, 2, 30, 7, 11), (64,), (3, 5, 31, 25)]


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "cache quantised"])
def test_packed_documents_are_as_if_each_were_alone(quantize):
    dims = replace(TINY, quantize_cache=quantize)
    units = build_units(dims, 0, torch.float64)
    batch = random_batch(dims, 0, ROWS)
    with torch.no_grad():
        logits = run_to_logits(units, batch)
        for b, lengths in enumerate(ROWS):
            start = 0
            for length in lengths:
                part = slice(start, start + length)
                alone = MicroBatch(*(t[b : b + 1, part] for t in batch[:3]))
                torch.testing.assert_close(
                    logits[b : b + 1, part], run_to_logits(units, alone), rtol=1e-9, atol=1e-9
                )
                start += length


def test_gradients_of_packed_documents_are_the_sum_of_each_alone():
    dims = replace(TINY, balance_loss_weight=0.0)
    packed, alone = (build_units(dims, 0, torch.float64) for _ in range(2))
    batch = random_batch(dims, 0, ROWS[:1])
    run(packed, batch).loss.backward()
    start = 0
    for length in ROWS[0]:
        part = MicroBatch(*(t[:, start : start + length] for t in batch[:3]))
        run(alone, part).loss.backward()
        start += length
    expected = named_grads(alone)
    for name, grad in named_grads(packed).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-7, atol=1e-9, msg=name)


def test_tokens_do_not_see_later_ones():
    units = build_units(TINY, 1, torch.float64)
    batch = random_batch(TINY, 1, [(50,)])
    changed = batch._replace(ids=batch.ids.clone())
    changed.ids[0, 31] = (changed.ids[0, 31] + 1) % 256
    with torch.no_grad():
        before, after = run_to_logits(units, batch), run_to_logits(units, changed)
    # Not bit for bit: experts multiply other numbers of rows.
    torch.testing.assert_close(before[:, :31], after[:, :31], rtol=1e-12, atol=1e-12)
    assert ((before - after)[:, 31:].abs().amax(-1) > 1e-6).all()


def train_step(units, batch, queue=None, recompute=False):
    """Gradients of two micro-batches, one after the other."""
    for unit in units:
        unit.zero_grad()
    for _ in range(2):
        carry = Carry()
        for unit in units:
            if recompute:
                carry = checkpoint(unit, carry, batch, use_reentrant=False)
            else:
                carry = unit(carry, batch)
        (carry.loss + carry.balance_loss).backward()
        for task in queue.pop() if queue else ():
            task()
    return named_grads(units), carry


def assert_same_bits(ours, expected):
    assert ours.keys() == expected.keys()
    for name, grad in ours.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_put_off_weight_gradients_and_recomputation_have_the_same_bits(dtype):
    batch = random_batch(TINY, 2, [(20, 29), (49,)])
    expected, carry = train_step(build_units(TINY, 2, dtype), batch)
    assert_same_bits(train_step(build_units(TINY, 2, dtype), batch)[0], expected)
    queue = WeightGradQueue()
    queue.deferring = True
    units = build_units(TINY, 2, dtype)
    for unit in units:
        set_queue(unit, queue)
    assert_same_bits(train_step(units, batch, queue)[0], expected)
    grads, again = train_step(build_units(TINY, 2, dtype), batch, recompute=True)
    assert_same_bits(grads, expected)
    assert torch.equal(carry.loss, again.loss)
    assert torch.equal(torch.stack(carry.loads), torch.stack(again.loads))
    assert all(grad.isfinite().all() for grad in expected.values())


def test_put_off_tasks_do_not_hold_the_graph():
    queue = WeightGradQueue()
    queue.deferring = True
    units = build_units(TINY, 0)
    for unit in units:
        set_queue(unit, queue)
    run(units, random_batch(TINY, 0, [(16,)])).loss.backward()
    assert len(queue) > 50
    for task in queue.pop():
        task()
    assert all(not grad.requires_grad for grad in named_grads(units).values())


DIFFERENTIABLE = ("streams", "mix", "kv")


def cut_step(units, batch):
    """Every unit is a stage of its own: only CROSSING fields and their gradients pass."""
    received, sent = [], []
    carry = Carry()
    for unit in units:
        inputs = Carry(
            **{
                field: getattr(carry, field).detach().requires_grad_(field in DIFFERENTIABLE)
                for field in CROSSING
                if getattr(carry, field) is not None
            }
        )
        carry = unit(inputs, batch)
        received.append(inputs)
        sent.append(carry)
    grads = {}
    for inputs, outputs in zip(reversed(received), reversed(sent), strict=True):
        roots = [
            (getattr(outputs, field), grads[field]) for field in DIFFERENTIABLE if field in grads
        ]
        roots += [(t, None) for t in (outputs.loss, outputs.balance_loss) if t is not None]
        roots = [root for root in roots if root[0].requires_grad]
        torch.autograd.backward(*zip(*roots, strict=True))
        leaves = {field: getattr(inputs, field) for field in DIFFERENTIABLE}
        grads = {field: leaf.grad for field, leaf in leaves.items() if leaf is not None}
        grads = {field: grad for field, grad in grads.items() if grad is not None}
    return sent[-1].loss


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "cache quantised"])
def test_a_cut_at_every_unit_gives_the_same_bits(quantize):
    dims = replace(TINY, quantize_cache=quantize)
    whole, cut = build_units(dims, 4), build_units(dims, 4)
    for seed in range(2):
        batch = random_batch(dims, seed, [(20, 29), (49,)])
        carry = run(whole, batch)
        (carry.loss + carry.balance_loss).backward()
        assert torch.equal(cut_step(cut, batch), carry.loss)
    assert_same_bits(named_grads(cut), named_grads(whole))


def edges_to(outputs, leaf):
    """How many edges of the graph behind `outputs` lead to `leaf`."""
    accumulator = leaf.view_as(leaf).grad_fn.next_functions[0][0]
    seen, todo, count = set(), [t.grad_fn for t in outputs if t is not None and t.grad_fn], 0
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is accumulator:
                count += 1
            elif following is not None:
                todo.append(following)
    return count


def test_each_unit_reads_what_crosses_by_one_edge():
    """Else a gradient's sum could be formed in another order where a stage begins."""
    units, batch = build_units(TINY, 0), random_batch(TINY, 0, [(32,)])
    carry = units[0](Carry(), batch)
    consumers = 0
    for unit in units[1:]:
        leaves = {
            field: getattr(carry, field).detach().requires_grad_()
            for field in ("streams", "mix", "kv")
            if getattr(carry, field) is not None
        }
        inputs = carry._replace(**leaves)
        carry = unit(inputs, batch)
        outputs = (carry.streams, carry.mix, carry.loss)
        if inputs.kv is not None:
            num_edges = edges_to(outputs, leaves["kv"])
            assert num_edges == ("kv" in unit.spec.reads), unit.spec.name
            consumers += num_edges
        assert edges_to(outputs, leaves["streams"]) == 1, unit.spec.name
        assert edges_to(outputs, leaves["mix"]) == 1, unit.spec.name
        carry = Carry(*(t.detach() if torch.is_tensor(t) else t for t in carry))
    assert consumers == 4


def test_units_pass_on_what_lives_in_the_planned_shapes():
    dims = replace(TINY, candidate_blocks=2)
    batch = random_batch(dims, 0, [(21, 16), (37,)])
    carry = Carry()
    for unit in build_units(dims, 0, torch.bfloat16)[:-1]:
        carry = unit(carry, batch)
        alive = tuple(field for field in CROSSING if getattr(carry, field) is not None)
        assert alive == unit.spec.live_after, unit.spec.name
        for field in alive:
            tensor = getattr(carry, field)
            shape, dtype = carry_shape(dims, field, 2, 37, after=unit.spec)
            assert tuple(tensor.shape) == shape, (unit.spec.name, field)
            assert str(tensor.dtype) == f"torch.{dtype}", (unit.spec.name, field)


def test_the_full_model_runs_on_the_meta_device_for_its_shapes():
    dims = preset("v41-flash")
    ids = torch.zeros(1, 512, dtype=torch.int64, device="meta")
    batch, carry = MicroBatch(ids, ids, ids), Carry()
    with torch.no_grad():
        for spec in unit_specs(dims)[:12]:
            unit = build_unit(dims, spec, device="meta", dtype=torch.bfloat16)
            carry = unit(carry, batch)
            for field in spec.live_after:
                shape, _ = carry_shape(dims, field, 1, 512, after=spec)
                assert tuple(getattr(carry, field).shape) == shape


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 9])
def test_sequences_shorter_than_window_and_selection_work(seq_len):
    units = build_units(TINY, 0)
    run(units, random_batch(TINY, 0, [(seq_len,)] * 2)).loss.backward()
    grads = named_grads(units)
    assert all(grad.isfinite().all() for grad in grads.values())
    assert (grads["embed.weight"] != 0).any() == (seq_len > 1)


def test_loads_count_every_token_of_every_moe():
    carry = run(build_units(TINY, 0), random_batch(TINY, 0, [(40,)] * 2))
    assert len(carry.loads) == 8
    assert all(loads.sum() == 2 * 40 * 2 for loads in carry.loads)


def test_ignored_labels_bring_no_loss_and_no_gradient():
    units = build_units(TINY, 0)
    batch = random_batch(TINY, 0, [(24,)], num_masked=24)
    carry = run(units, batch)
    carry.loss.backward()
    assert carry.loss.item() == 0
    assert all((grad == 0).all() for grad in named_grads(units).values())


def test_forced_balance_evens_loads_and_keeps_gradients_of_the_router():
    units = build_units(replace(TINY, force_balanced_routing=True), 0)
    carry = run(units, random_batch(TINY, 0, [(40,)] * 2))
    carry.loss.backward()
    assert all(loads.max() - loads.min() <= 1 for loads in carry.loads)
    assert (named_grads(units)["layers.3.moe.moe.router.gate.weight"] != 0).any()


def test_initial_values_depend_on_seed_and_name_alone():
    specs = unit_specs(TINY)
    states = []
    for order in (range(len(specs)), reversed(range(len(specs)))):
        state = {}
        for i in order:
            unit = build_unit(TINY, specs[i], dtype=torch.float32)
            init_parameters(unit, specs[i].name, 7)
            state |= {f"{specs[i].name}.{n}": p for n, p in unit.named_parameters()}
        states.append(state)
    assert_same_bits(states[0], states[1])
    drawn = [p.detach() for p in states[0].values() if p.dim() > 1 and p.std() > 0]
    assert len({tuple(p.flatten()[:4].tolist()) for p in drawn}) == len(drawn)
    everything = torch.cat([p.flatten() for p in drawn])
    assert everything.std().item() == pytest.approx(0.02, rel=0.01)
    assert everything.mean().item() == pytest.approx(0, abs=1e-4)


def test_rows_of_a_parameter_can_be_drawn_without_the_others():
    whole, part = torch.empty(70_000, 3), torch.empty(100, 3)
    fill_normal(whole, "table", 0, 0.02)
    fill_normal(part, "table", 0, 0.02, first_row=65_500)
    assert torch.equal(part, whole[65_500:65_600])
    experts, one = torch.empty(5, 4, 3), torch.empty(1, 4, 3)
    fill_normal(experts, "experts", 0, 0.02)
    fill_normal(one, "experts", 0, 0.02, first_row=3)
    assert torch.equal(one[0], experts[3])


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_rows_that_are_drawn_where_they_lie_depend_on_their_name_alone_too(device):
    whole, part = (torch.zeros(shape, device=device) for shape in ((70_000, 4), (4_500, 4)))
    fill_normal(whole, "table", 0, 0.02, on_device=True)
    fill_normal(part, "table", 0, 0.02, first_row=65_500, on_device=True)
    assert torch.equal(part, whole[65_500:])
    assert 0.019 < whole.std() < 0.021
    if device == "cpu":
        again = torch.zeros_like(whole)
        fill_normal(again, "table", 0, 0.02)
        assert torch.equal(again, whole)


def test_a_model_made_on_the_meta_device_becomes_the_same():
    batch = random_batch(TINY, 0, [(16,)])
    here, there = [], []
    for spec in unit_specs(TINY):
        here.append(build_unit(TINY, spec, dtype=torch.float32))
        there.append(build_unit(TINY, spec, device="meta", dtype=torch.float32))
        there[-1].to_empty(device="cpu")
        for unit in (here[-1], there[-1]):
            init_parameters(unit, spec.name, 0)
    assert torch.equal(run(here, batch).loss, run(there, batch).loss)


def test_a_fresh_model_predicts_uniformly_and_a_few_steps_teach_it():
    units = []
    for spec in unit_specs(TINY):
        units.append(build_unit(TINY, spec, dtype=torch.float32))
        init_parameters(units[-1], spec.name, 0)
    batch = random_batch(TINY, 0, [(32,)])
    parameters = [p for unit in units for p in unit.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = mean_loss(units, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.1)
    assert losses[-1] < losses[0] - 1
