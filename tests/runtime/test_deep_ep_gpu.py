"""deep_ep on two GPUs: against the readable buffer, and its dispatcher against all-to-all."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from rank_pool import run_in_pool
from small_runs import GPU_SECONDS

from ppruntime.experts.deep_ep import DeepEpBuffer
from ppruntime.experts.exchange import ProcessExchange
from ppruntime.models.all_to_all import AllToAll
from ppruntime.models.dims import preset
from ppruntime.models.dispatch import WireOptions
from ppruntime.models.fp8_experts import Fp8Options
from ppruntime.models.fp8_wire import as_bytes, to_wire
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.moe import MoE, MoEOptions
from ppruntime.models.router import Routing, expert_counts
from ppruntime.models.token_buffer import ExchangeBuffer
from ppruntime.models.token_dispatch import TokenDispatcher

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(find_spec("deep_ep") is None, reason="needs the package deep_ep"),
]
DIMS = replace(
    preset("tiny"), hidden_size=1024, expert_width=512, num_experts=16, experts_per_token=6
)
TOKENS = {"even": (512, 512), "uneven": (700, 90), "to one rank": (300, 300)}


def open_buffer() -> tuple[DeepEpBuffer, dist.ProcessGroup]:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.zeros((), device="cuda"), group=group)
    return DeepEpBuffer(group, (0, 1), hidden=DIMS.hidden_size, num_sms=24), group


def tokens_of(case: str, rank: int):
    torch.manual_seed(10 * len(case) + rank)
    num = TOKENS[case][rank]
    among = DIMS.num_experts // 2 if case == "to one rank" else DIMS.num_experts
    experts = torch.rand(num, among).argsort(-1)[:, : DIMS.experts_per_token].contiguous()
    x = torch.randn(num, DIMS.hidden_size).bfloat16()
    return x, experts, torch.rand(num, DIMS.experts_per_token) + 0.1, torch.randn(x.shape)


def same(found, expected) -> bool:
    found, expected = ((t,) if isinstance(t, torch.Tensor) else t for t in (found, expected))
    return all(
        torch.equal(as_bytes(a.cpu()), as_bytes(b)) for a, b in zip(found, expected, strict=True)
    )


def buffers_agree(rank: int):
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    ours, group = open_buffer()
    readable = ExchangeBuffer(ProcessExchange.of(group))
    found: dict[str, bool] = {}
    for case in TOKENS:
        x, experts, weights, _ = tokens_of(case, rank)
        for kind, rows in (("bf16", x), ("FP8", to_wire(x))):
            on_gpu = rows.cuda() if kind == "bf16" else tuple(part.cuda() for part in rows)
            arrived = ours.dispatch(
                on_gpu, experts.cuda(), weights.cuda(), DIMS.num_experts, after=ours.now()
            )()
            expected = readable.dispatch(rows, experts, weights, DIMS.num_experts, after=None)()
            name = f"{case}, {kind}"
            found[f"{name}: rows"] = same(arrived.x, expected.x)
            found[f"{name}: experts"] = same(arrived.expert_SK, expected.expert_SK)
            found[f"{name}: weights"] = same(arrived.weight_SK, expected.weight_SK)
            found[f"{name}: counts"] = list(arrived.counts) == list(expected.counts)
            again = ours.again(on_gpu, arrived.handle, after=ours.now())()
            found[f"{name}: again"] = same(again, expected.x)
            y = torch.randn(expected.expert_SK.shape[0], DIMS.hidden_size).bfloat16()
            total, back = ours.combine(
                y.cuda(), arrived.handle, arrived.weight_SK, after=ours.now()
            )()
            sums, weights_back = readable.combine(
                y, expected.handle, expected.weight_SK, after=None
            )()
            found[f"{name}: sums"] = same(total, sums)
            found[f"{name}: weights back"] = same(back, weights_back)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def buffers():
    """What `buffers_agree` found, by rank."""
    return run_in_pool(2, buffers_agree, timeout_seconds=GPU_SECONDS)


@pytest.mark.parametrize("kind", ["bf16", "FP8"])
@pytest.mark.parametrize("case", TOKENS)
def test_the_readable_buffer_says_bit_by_bit_what_deep_ep_does(case, kind, buffers):
    for found in buffers:
        here = {name: same for name, same in found.items() if name.startswith(f"{case}, {kind}: ")}
        assert len(here) == 7
        assert all(here.values()), [name for name, same in here.items() if not same]


def results(dispatcher, fp8, case: str, rank: int):
    moe = MoE(DIMS, options=MoEOptions(fp8, dispatcher), device="cuda", dtype=torch.bfloat16)
    init_parameters(moe, "moe", 1, std=0.1)
    x, experts, weights, grad = (t.cuda() for t in tokens_of(case, rank))
    x.requires_grad_(), weights.requires_grad_()
    routing = Routing(experts, weights, weights)
    y = moe.routed(x, routing, expert_counts(experts, 1, DIMS.num_experts))
    y.backward(grad)
    return [y.detach(), x.grad, weights.grad, *(w.grad for w in moe.experts.parameters())]


def dispatchers_agree(rank: int):
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    buffer, group = open_buffer()
    rows = AllToAll(ProcessExchange.of(group))
    found: dict[str, list[float]] = {}
    kinds = {"bf16": None, "triton": Fp8Options(backend=ExpertBackend.TRITON)}
    for case in TOKENS:
        for kind, fp8 in kinds.items():
            expected = results(rows, fp8, case, rank)
            again = results(rows, fp8, case, rank)
            found[f"{case}, {kind}, twice"] = distances(again, expected)
            for chunks in (1, 2, 4):
                for wire in (WireOptions(), WireOptions(fp8=True, weight_grads_after_combine=True)):
                    tokens = TokenDispatcher(buffer, wire, num_chunks=chunks)
                    name = f"{case}, {kind}, {chunks}, {wire.fp8}"
                    found[name] = distances(results(tokens, fp8, case, rank), expected)
    dist.destroy_process_group()
    return found


def distances(found, expected) -> list[float]:
    """Zero where both are: a rank that gets no row has no gradient of its weights."""
    return [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in zip(found, expected, strict=True)
    ]


@pytest.fixture(scope="module")
def dispatchers():
    """What `dispatchers_agree` found, by rank."""
    return run_in_pool(2, dispatchers_agree, timeout_seconds=GPU_SECONDS)


@pytest.mark.parametrize("kind", ["bf16", "triton"])
@pytest.mark.parametrize("case", TOKENS)
def test_tokens_sent_once_give_all_to_alls_results_within_bf16(case, kind, dispatchers):
    for found in dispatchers:
        here = {
            name: errors for name, errors in found.items() if name.startswith(f"{case}, {kind}")
        }
        assert len(here) == 7
        for name, errors in here.items():
            _, _, chunks, *wire = name.split(", ")
            if chunks == "twice":
                assert errors == [0] * 5, name
            elif kind == "triton":
                assert max(errors[:3]) < 6e-3, name
                # One chunk: the same rows in the same order. More: scales over other rows.
                assert max(errors[3:]) < (1e-12 if chunks == "1" else 0.06), name
            else:
                assert max(errors) < (0.06 if wire == ["True"] else 1e-2), name
