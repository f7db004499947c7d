"""The fused MoE layer: ranks played by one process against the readable experts, fp64, and one
rank alone."""

import pytest
import torch
from fp8_cases import DEVICE, ON_GPU, distance
from mega_cases import SHORT_LIMIT, make_ranks, meet, run_together
from msgspec.structs import replace
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ppruntime.models.dims import preset
from ppruntime.models.dispatch import AllHere
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Experts, Fp8Options, MicroBatch
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.mega_moe import bf16_weight_grads
from ppruntime.models.mega_moe_passes import MegaMoeOptions
from ppruntime.models.mega_moe_rules import ArenaShape, MeetingError, PoolOverflow
from ppruntime.models.router import Routing
from ppruntime.models.save_points import SavePoint, point_of

pytestmark = pytest.mark.gpu if ON_GPU else []
HIDDEN, WIDTH, PER_TOKEN, EXPERTS = 128, 128, 2, 4
DIMS = replace(
    preset("tiny"),
    hidden_size=HIDDEN,
    expert_width=WIDTH,
    num_experts=EXPERTS,
    experts_per_token=PER_TOKEN,
)
NAMES = ("y", "dx", "dp", "dW13", "dW2")
CASES = {
    "uneven": (9, 4),
    "all to the first experts": (6, 5),
    "a rank without tokens": (7, 0),
    "four ranks, most rows to one": (5, 3, 0, 8),
    "no tokens at all": (0, 0),
}
FEW = list(CASES) if ON_GPU else ["uneven", "no tokens at all"]
"""In the interpreter a pass takes a second."""
MOST_TOKENS = 9


def shape_of(most_tokens=MOST_TOKENS):
    return ArenaShape(
        most_tokens=most_tokens, per_token=PER_TOKEN, num_experts=EXPERTS, hidden=HIDDEN
    )


def batches(case, sizes):
    """Tokens, experts, weights and gradients of each rank."""
    generator = torch.Generator().manual_seed(len(case))
    made = []
    for num in sizes:
        experts = torch.rand(num, EXPERTS, generator=generator).argsort(-1)[:, :PER_TOKEN]
        if case == "all to the first experts":
            experts = torch.arange(PER_TOKEN).expand(num, -1).clone()
        if case.endswith("to one"):
            experts = torch.stack([torch.full((num,), 3), torch.arange(num) % 3], 1)
        made.append(
            (
                torch.randn(num, HIDDEN, generator=generator).bfloat16().to(DEVICE),
                experts.to(DEVICE),
                (torch.rand(num, PER_TOKEN, generator=generator) + 0.2).to(DEVICE),
                torch.randn(num, HIDDEN, generator=generator).to(DEVICE),
            )
        )
    return made


def make_experts(kind, held=None, **options):
    whole = range(EXPERTS)
    if kind == "bf16":
        experts = Experts(DIMS, held=held, device=DEVICE, dtype=torch.bfloat16)
    else:
        backend = ExpertBackend.TRITON if ON_GPU else ExpertBackend.REFERENCE
        options = Fp8Options(backend=backend, **options)
        experts = Fp8Experts(DIMS, options, held=held, device=DEVICE, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in experts.parameters():
            values = torch.randn(EXPERTS, *weight.shape[1:], generator=generator) * 0.06
            held = held or whole
            weight.copy_(values[held.start : held.stop])
    return experts


def alone(kind, batch, dtype=None):
    """All experts in one process, whose tokens are all ranks' one after another."""
    x, experts_NK, weights, grad = (torch.cat(parts) for parts in zip(*batch, strict=True))
    experts = make_experts(kind)
    if dtype is not None:
        experts = experts.to(dtype)
        x, weights, grad = (t.to(dtype) for t in (x, weights, grad))
    x, weights = x.requires_grad_(), weights.requires_grad_()
    counts = torch.bincount(experts_NK.flatten(), minlength=EXPERTS)
    y = AllHere().routed(experts, x, Routing(experts_NK, weights, weights), counts)
    y.backward(grad)
    return [y.detach(), x.grad, weights.grad, *(w.grad for w in experts.parameters())]


def together(kind, batch, mega=None, **options):
    """The same of ranks that each have a part of the experts."""
    ranks = make_ranks(len(batch), shape_of(), mega)
    layers = [make_experts(kind, rank.held(EXPERTS), **options) for rank in ranks]
    fp8 = kind == "FP8"
    forwards, copies = [], []
    for rank, layer, (x, experts_NK, weights, _) in zip(ranks, layers, batch, strict=True):
        copy = layer.quantized() if fp8 else (layer.gate_up.weight, layer.down.weight)
        copies.append(copy)
        matrices = (copy.gate_up, copy.down) if fp8 else copy
        forwards.append(
            rank.forward_steps(
                x, experts_NK, weights, matrices, float(layer.limit), power_of_two=fp8
            )
        )
    with torch.no_grad():
        results = run_together(ranks, forwards)
        backwards = []
        for rank, layer, copy, (_, kept), (*_, grad) in zip(
            ranks, layers, copies, results, batch, strict=True
        ):
            if options.get("keep_expert_activations") is False:
                kept = kept._replace(z_RC=None)
            if fp8:
                grad = grad.bfloat16()
            backwards.append(
                rank.backward_steps(
                    grad, kept, copy, float(layer.limit), dtype=torch.bfloat16, tile_scales=False
                )
            )
        grads = run_together(ranks, backwards)
    for layer, one in zip(layers, grads, strict=True):
        if isinstance(one.operands, MicroBatch):
            layer.put_weight_grads(one.operands)
        else:
            weights = layer.gate_up.weight, layer.down.weight
            assert bf16_weight_grads(layer, one.operands, *weights) == (None, None)
    return [
        torch.cat([y.float() for y, _ in results]),
        torch.cat([one.x_ND for one in grads]),
        torch.cat([one.weights_NK for one in grads]),
        torch.cat([layer.gate_up.weight.grad for layer in layers]),
        torch.cat([layer.down.weight.grad for layer in layers]),
    ]


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        pytest.param(case, sizes, marks=[] if case in FEW else pytest.mark.long, id=case)
        for case, sizes in CASES.items()
    ],
)
def test_bf16_ranks_compute_what_the_readable_experts_do(case, sizes):
    batch = batches(case, sizes)
    got, readable = together("bf16", batch), alone("bf16", batch)
    exact = alone("bf16", batch, torch.float64)
    for name, a, b, true in zip(NAMES, got, readable, exact, strict=True):
        assert a.shape == b.shape, name
        if true.numel() == 0 or not true.any():
            assert not a.any(), name
            continue
        assert distance(a, true) < 8e-3, name
        assert distance(a, true) < 1.5 * distance(b, true) + 1e-3, name


def assert_fp8_agrees(batch, expected, **options):
    """Bitwise where both sides have the same kernels: on a GPU. In the interpreter the yardstick
    is the recipe in torch, whose sums come in another order."""
    got = together("FP8", batch, **options)
    for name, a, b in zip(NAMES, got, expected, strict=True):
        assert torch.equal(a, b.to(a.dtype)) if ON_GPU else distance(a, b) < 2e-2, name
    return got


@pytest.mark.long
def test_fp8_ranks_compute_what_one_process_makes_of_their_tokens():
    batch = batches("uneven", (6, 3))
    assert_fp8_agrees(batch, alone("FP8", batch))


@pytest.mark.long
@pytest.mark.parametrize(("case", "sizes"), list(CASES.items())[:4], ids=list(CASES)[:4])
def test_fp8_ranks_agree_with_one_process_whatever_the_routing(case, sizes):
    batch = batches(case, sizes)
    expected = alone("FP8", batch)
    got = assert_fp8_agrees(batch, expected)
    again = assert_fp8_agrees(batch, expected, keep_expert_activations=False)
    for name, a, b in zip(NAMES, got, again, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.long
def test_gradients_in_fp8_move_the_gradients_alone():
    batch = batches("uneven", (9, 4))
    plain = together("FP8", batch)
    got = together("FP8", batch, MegaMoeOptions(num_sms=3, fp8_grad=True))
    assert torch.equal(got[0], plain[0])
    for name, a, b in list(zip(NAMES, got, plain, strict=True))[1:]:
        assert 0 < distance(a, b) < 5e-2, name


@pytest.mark.long
def test_results_repeat_bit_for_bit_and_depend_on_no_number_of_multiprocessors():
    batch = batches("uneven", (7, 5))
    first = together("bf16", batch)
    again = together("bf16", batch, MegaMoeOptions(num_sms=1, gemm_sms=GemmSms(2)))
    for name, a, b in zip(NAMES, first, again, strict=True):
        assert torch.equal(a, b), name


def forwards(ranks, batch):
    """A forward of each rank, in bf16, not begun."""
    passes = []
    for rank, (x, experts_NK, weights, _) in zip(ranks, batch, strict=True):
        layer = make_experts("bf16", rank.held(EXPERTS))
        matrices = (layer.gate_up.weight.detach(), layer.down.weight.detach())
        passes.append(
            rank.forward_steps(x, experts_NK, weights, matrices, 10.0, power_of_two=False)
        )
    return passes


def test_too_many_rows_for_one_rank_stop_every_rank_before_a_row_is_sent():
    ranks = make_ranks(2, shape_of(), MegaMoeOptions(capacity_factor=1.0))
    passes = forwards(ranks, batches("all to the first experts", (9, 9)))
    for steps in passes:
        assert next(steps) is None
    for rank in ranks:
        # As all hear it: 200 rows a rank and expert, at a rank that may keep 384 in all.
        rank.arena.told()[:, :2] = 200
        rank.arena.places(MOST_TOKENS).fill_(7)
    meet([rank.arena for rank in ranks])
    for steps in passes:
        assert next(steps) is None
    meet([rank.arena for rank in ranks])
    texts = []
    for rank, steps in zip(ranks, passes, strict=True):
        with pytest.raises(PoolOverflow) as raised:
            next(steps)
        texts.append(str(raised.value))
        assert (rank.arena.places(MOST_TOKENS) == 7).all()
        assert not rank.arena.error.item()
    assert texts[0] == texts[1]
    assert "rank 0 of the expert group would get 1024 rows" in texts[0]
    assert "capacity_factor = 1 allows 384" in texts[0]


def test_a_pool_too_small_for_what_comes_costs_one_meeting_and_no_bit():
    batch = batches("uneven", (9, 4))
    (plain, small) = (make_ranks(2, shape_of()) for _ in range(2))
    expected = run_together(plain, forwards(plain, batch))
    small[1].rooms[0] = 128  # it gets rows for two experts
    got = run_together(small, forwards(small, batch))
    assert [rank.arena.num_meetings for rank in (*plain, *small)] == [2, 2, 3, 3]
    assert small[1].rooms[0] >= len(got[1][1].home_R) == 256
    again = run_together(small, forwards(small, batch))
    assert [rank.arena.num_meetings for rank in small] == [5, 5]
    for results in (got, again):
        for (y, kept), (y_plain, kept_plain) in zip(results, expected, strict=True):
            assert torch.equal(y, y_plain)
            assert kept.z_RC.shape == kept_plain.z_RC.shape
            live = kept.pair_R >= 0
            assert torch.equal(kept.z_RC[live], kept_plain.z_RC[live])
            for name in ("rows", "home_R", "weight_R", "packed", "rows_L"):
                assert torch.equal(getattr(kept, name), getattr(kept_plain, name)), name


def test_room_follows_what_a_layer_takes_and_stays_while_it_fits():
    (rank,) = make_ranks(1, shape_of())
    fair = 128 + EXPERTS * 128
    for rows, room in ((128, fair), (fair, fair), (1280, 1408), (1408, 1408), (768, 1408)):
        rank._make_room(0, rows)
        assert rank._room(0) == room
    rank._make_room(0, 512)  # half of it would do
    assert rank._room(0) == fair
    assert rank._room(1) == fair
    experts = [make_experts("bf16") for _ in range(2)]
    assert [rank.layer_of(one) for one in (*experts, *experts)] == [0, 1, 0, 1]


def test_what_one_rank_waited_for_in_vain_all_ranks_hear_with_the_next_counts():
    ranks = make_ranks(2, shape_of(), limit=SHORT_LIMIT)
    ranks[0].arena.meet()  # rank 1 does not come
    passes = forwards(ranks, batches("uneven", (2, 2)))
    for _ in range(2):
        for steps in passes:
            assert next(steps) is None
        meet([rank.arena for rank in ranks])
    codes = torch.stack([next(steps).cpu() for steps in passes])
    texts = []
    for steps in passes:
        with pytest.raises(MeetingError) as raised:
            steps.send(codes)
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert "rank 0 waited too long for rank 1" in texts[0]


def test_a_peer_that_wakes_after_the_others_went_on_hears_of_it_and_reads_nothing_torn():
    """Rank 1 begins its layer when rank 0 is in its next one, with other counts and lists."""
    early, late = make_ranks(2, shape_of(), limit=SHORT_LIMIT)
    first, second = batches("uneven", (9, 4)), batches("all to the first experts", (2, 2))
    (_, kept) = early.run(forwards([early], first[:1])[0])
    assert (kept.home_R == -1).all()
    going_on = forwards([early], second[:1])[0]
    for _ in range(2):
        assert next(going_on) is None
        early.arena.meet()
    codes = [next(going_on).cpu()]
    waking = forwards([late], [first[1]])[0]
    for _ in range(2):
        assert next(waking) is None
        late.arena.meet()
    codes.append(next(waking).cpu())
    # What rank 0 told when it gave up, with its own numbers from then.
    counts = torch.bincount(first[0][1].flatten().cpu(), minlength=EXPERTS)
    assert late.arena.told()[0, :EXPERTS].tolist() == counts.tolist()
    texts = []
    for steps in (going_on, waking):
        with pytest.raises(MeetingError) as raised:
            steps.send(torch.stack(codes))
        texts.append(str(raised.value))
    assert texts[0] == texts[1]
    assert "rank 0 waited too long for rank 1" in texts[0]


ROUTINGS = {
    "random": lambda order, num: order,
    "all to the last expert": lambda order, num: torch.tensor([3, 0]).expand(num, -1),
    "half of them nowhere": lambda order, num: torch.where(torch.arange(2) < 1, order, -1),
    "all nowhere": lambda order, num: torch.full_like(order, -1),
}


@pytest.mark.long
def test_no_layer_finds_anything_of_the_layers_before_it_in_the_arenas():
    """One group of four through layers of other sizes and routings, each against fp64, with pools
    that are too small now and then."""
    ranks = make_ranks(4, shape_of())
    experts = [make_experts("bf16", rank.held(EXPERTS)) for rank in ranks]
    whole = make_experts("bf16").to(torch.float64)
    for number, (name, route) in enumerate([*ROUTINGS.items()] * 2):
        sizes = [(9, 0, 1, 3)[(number + place) % 4] for place in range(4)]
        batch = [
            (x, route(order.cpu(), len(x)).contiguous().to(DEVICE), weights, grad)
            for x, order, weights, grad in batches("x" * number, sizes)
        ]
        if number % 3 == 1:
            ranks[number % 4].rooms[0] = 128
        with torch.no_grad():
            results = run_together(ranks, [
                rank.forward_steps(
                    x, order, weights, tuple(layer.parameters()), float(layer.limit),
                    power_of_two=False,
                )
                for rank, layer, (x, order, weights, _) in zip(ranks, experts, batch, strict=True)
            ])  # fmt: skip
            grads = run_together(ranks, [
                rank.backward_steps(
                    grad, kept, tuple(layer.parameters()), float(layer.limit),
                    dtype=torch.bfloat16, tile_scales=False,
                )
                for rank, layer, (_, kept), (*_, grad) in zip(
                    ranks, experts, results, batch, strict=True
                )
            ])  # fmt: skip
        x, order, weights, grad = (torch.cat(parts) for parts in zip(*batch, strict=True))
        x, weights = (t.double().requires_grad_() for t in (x, weights))
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, k = (order == expert).nonzero(as_tuple=True)
            rows = [0] * EXPERTS
            rows[expert] = len(token)
            of_pair = whole(x[token], rows) * weights[token, k].unsqueeze(1)
            y = y.index_add(0, token, of_pair)
        y.backward(grad.double())
        got = (
            torch.cat([one.float() for one, _ in results]),
            torch.cat([one.x_ND for one in grads]),
            torch.cat([one.weights_NK for one in grads]),
        )
        for what, a, b in zip(NAMES, got, (y.detach(), x.grad, weights.grad), strict=False):
            assert (distance(a, b) < 8e-3) if b.any() else not a.any(), (number, name, what)
    assert not any(rank.arena.error.item() for rank in ranks)


def test_a_rank_whose_peer_never_comes_ends_its_forward_with_a_pool_of_padding():
    rank, _ = make_ranks(2, shape_of(), limit=SHORT_LIMIT)
    batch = batches("uneven", (9, 4))
    (_, kept) = rank.run(forwards([rank], batch[:1])[0])
    assert rank.arena.error.item() == 2  # 1 + the rank
    assert (kept.home_R == -1).all()
    assert len(kept.home_R) == len(kept.z_RC) == 128


# One rank: the dispatcher as a layer calls it.


def routed(dispatcher, experts, batch, *, queue=None, context=None):
    """Results of one forward and backward through autograd."""
    x, experts_NK, weights, grad = batch
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    set_queue(experts, queue)
    counts = torch.bincount(experts_NK.flatten(), minlength=EXPERTS)

    def run(x, weights):
        return dispatcher.routed(experts, x, Routing(experts_NK, weights, weights), counts)

    if context is None:
        y = run(x, weights)
    else:
        y = checkpoint(run, x, weights, use_reentrant=False, context_fn=context)
    y.backward(grad)
    for task in queue.pop() if queue else ():
        task()
    grads = [w.grad for w in experts.parameters()]
    return [y.detach(), x.grad, weights.grad, *grads]


def keep_experts():
    def policy(context, op, *args, **kwargs):
        del context, args, kwargs
        kept = point_of(op.name().removesuffix(".default")) is SavePoint.EXPERTS
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def test_weight_gradients_that_wait_and_a_recompute_that_sends_nothing_change_no_bit():
    (batch,) = batches("one", (6 if ON_GPU else 1,))
    (rank,) = make_ranks(1, shape_of())
    plain = routed(rank, make_experts("bf16"), batch)
    queue = WeightGradQueue()
    queue.deferring = True
    met = rank.arena.num_meetings
    other = routed(rank, make_experts("bf16"), batch, queue=queue, context=keep_experts)
    assert rank.arena.num_meetings - met == 4
    for name, a, b in zip(NAMES, other, plain, strict=True):
        assert torch.equal(a, b), name
    rank.check()


@pytest.mark.long
def test_fp8_weight_gradients_of_micro_batches_are_added_together():
    (rank,) = make_ranks(1, shape_of())
    apart = make_experts("FP8")
    fused = make_experts("FP8", fused_wgrad_micro_batches=2)
    for seed, size in enumerate((5, 4)):
        (batch,) = batches("x" * seed, (size,))
        results = [routed(rank, experts, batch)[:3] for experts in (apart, fused)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for a, b in zip(apart.parameters(), fused.parameters(), strict=True):
        assert a.grad.dtype is torch.float32
        assert torch.equal(a.grad, b.grad)
