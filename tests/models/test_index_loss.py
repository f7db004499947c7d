"""The loss that teaches the indexer: its formula, gradients, memory, and its place in models."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch.utils.checkpoint import checkpoint
from whole_model import build_units, named_grads, random_batch, run

from ppruntime.models import index_loss as module
from ppruntime.models.carry import Carry
from ppruntime.models.dims import preset, unit_parameters, unit_specs
from ppruntime.models.index_loss import Attended, Scoring, index_loss
from ppruntime.models.linear import WeightGradQueue, set_queue

LEARNING = replace(preset("tiny"), indexer_loss_weight=0.5)


class Case:
    """Random index queries and attention; some queries picked few entries, some none."""

    def __init__(self, dtype=torch.float64, batch=2, tokens=11, entries=9, window=3, picks=4):
        g = torch.Generator().manual_seed(0)

        def normal(*shape):
            return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

        self.scoring = Scoring(
            *(
                t.requires_grad_()
                for t in (
                    normal(batch, tokens, 5, 8),
                    normal(batch, tokens, 5),
                    normal(batch, entries, 8),
                )
            )
        )
        order = torch.rand(batch, tokens, entries, generator=g).argsort(-1)[..., :picks]
        order = order.sort(-1).values
        num_there = torch.randint(0, picks + 1, (batch, tokens, 1), generator=g)
        num_there[0, 3] = 0
        self.picks = torch.where(torch.arange(picks) < num_there, order, -1)
        own = torch.randint(-1, tokens, (batch, tokens, window), generator=g)
        picked = torch.where(self.picks >= 0, self.picks + tokens, -1)
        self.attended = Attended(
            normal(batch, tokens, 3, 6),
            normal(batch, tokens + entries, 6),
            torch.cat((own, picked), -1).int(),
            normal(3),
        )
        self.num_picks = picks

    def loss(self):
        return index_loss(self.scoring, self.attended, self.num_picks)

    def results(self):
        loss = self.loss()
        return loss.detach(), *torch.autograd.grad(loss, self.scoring)

    def plainly(self):
        """Query by query, as it is written, by autograd in fp64."""
        q, weights, keys = leaves = [t.detach().double().requires_grad_() for t in self.scoring]
        aq, akeys, sink = (t.double() for t in (*self.attended[:2], self.attended.sink_H))
        batch, tokens = self.picks.shape[:2]
        total = torch.zeros((), dtype=torch.float64)
        for b in range(batch):
            for t in range(tokens):
                picked = self.picks[b, t][self.picks[b, t] >= 0]
                if len(picked) == 0:
                    continue
                slots = self.attended.slots_BTW[b, t]
                slots = slots[slots >= 0]
                logits = aq[b, t] @ akeys[b, slots].T / aq.shape[-1] ** 0.5
                probabilities = torch.cat((logits, sink[:, None]), 1).softmax(1)
                p = probabilities[:, len(slots) - len(picked) : len(slots)].sum(0)
                p = p / p.sum()
                scores = weights[b, t] @ (q[b, t] @ keys[b, picked].T).relu()
                total = total + (p * (p.log() - scores.log_softmax(0))).sum() / tokens
        return total.detach(), *torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("num_gathered", [300, 1 << 25])
def test_loss_and_gradients_are_the_formulas_whatever_the_chunk(num_gathered, monkeypatch):
    monkeypatch.setattr(module, "_MAX_GATHERED", num_gathered)
    case = Case()
    for found, expected in zip(case.results(), case.plainly(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_in_low_precision_it_is_near_and_in_the_inputs_types():
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        case = Case(dtype)
        for found, expected in zip(case.results(), case.plainly(), strict=True):
            assert found.dtype is (torch.float32 if found.dim() == 0 else dtype)
            assert (found.double() - expected).norm() < bound * expected.norm()


def test_extreme_scores_and_empty_lists_stay_finite():
    case = Case(torch.float32)
    case.scoring = Scoring(*((1e3 * t).detach().requires_grad_() for t in case.scoring))
    case.attended = case.attended._replace(q_BTHK=1e3 * case.attended.q_BTHK)
    assert all(result.isfinite().all() for result in case.results())
    case = Case(torch.float32)
    case.attended = case.attended._replace(slots_BTW=torch.full_like(case.attended.slots_BTW, -1))
    assert not any(result.any() for result in case.results())
    assert not any(result.any() for result in Case(torch.float32, entries=0, picks=0).results())


def test_it_holds_one_chunks_scores_at_a_time(monkeypatch):
    """Every tensor that is made is smaller than queries x entries, were these many."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numel = max(self.numel, result.untyped_storage().nbytes() // 4)
            return result

    monkeypatch.setattr(module, "_MAX_GATHERED", 1 << 12)
    case = Case(torch.float32, batch=1, tokens=300, entries=280)
    with Largest() as largest:
        case.results()
    assert largest.numel < 300 * 280 / 4


def train_step(dims, batch, *, queue=None, recompute=False):
    units = build_units(dims, 3)
    for unit in units:
        set_queue(unit, queue)
    carry = Carry()
    for unit in units:
        arguments = (unit, carry, batch)
        carry = checkpoint(*arguments, use_reentrant=False) if recompute else unit(carry, batch)
    sums = (carry.loss, carry.balance_loss, carry.index_loss)
    torch.autograd.backward([found for found in sums if found is not None])
    for task in queue.pop() if queue else ():
        task()
    return carry, named_grads(units)


@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_gradients_go_into_the_indexers_alone(name):
    dims = replace(preset(name), indexer_loss_weight=0.5)
    batch = random_batch(dims, 1, [(20, 17)])
    carry, grads = train_step(dims, batch)
    frozen, expected = train_step(preset(name), batch)
    assert torch.equal(carry.loss, frozen.loss)
    assert frozen.index_loss is None
    assert carry.index_loss > 0
    of_indexer = {key for key in grads if ".indexer." in key}
    assert of_indexer == {
        f"{spec.name}.{parameter.name}"
        for spec in unit_specs(dims)
        for parameter in unit_parameters(dims, spec)
        if ".indexer." in parameter.name
    }
    assert all(grads[key].any() for key in of_indexer)
    assert grads.keys() - of_indexer == expected.keys()
    assert all(torch.equal(grads[key], grad) for key, grad in expected.items())


def test_put_off_weight_gradients_and_recomputation_have_the_same_bits():
    batch = random_batch(LEARNING, 1, [(20, 17)])
    carry, expected = train_step(LEARNING, batch)
    queue = WeightGradQueue()
    queue.deferring = True
    for options in ({"queue": queue}, {"recompute": True}):
        again, grads = train_step(LEARNING, batch, **options)
        assert torch.equal(again.index_loss, carry.index_loss)
        assert grads.keys() == expected.keys()
        assert all(torch.equal(grads[key], expected[key]) for key in expected)


@pytest.mark.long
def test_following_the_gradient_lowers_the_loss():
    units, batch = build_units(LEARNING, 3), random_batch(LEARNING, 1, [(20, 17)])
    found = []
    for _ in range(4):
        loss = run(units, batch).index_loss
        found.append(loss.item())
        loss.backward()
        with torch.no_grad():
            for unit in units:
                for parameter in unit.parameters():
                    if parameter.grad is not None:
                        parameter -= 10 * parameter.grad
                        parameter.grad = None
    assert found[-1] < 0.9 * found[0]
