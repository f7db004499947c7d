"""The sparse attention kernels against the readable reference.

On the CPU at small shapes: the Triton kernels in Triton's interpreter, the Gluon ones simulated. On
a GPU at the models' width.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from simulated_gluon import simulated
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ppruntime.models.documents import window_slots
from ppruntime.models.kernels import sparse_attention as kernels
from ppruntime.models.kernels import sparse_attention_library, unavailable_reason
from ppruntime.models.rope import Rotation, rotate
from ppruntime.models.sparse_attention import sparse_attention as reference

ROOT = Path(__file__).parents[2]
on_gpu = torch.cuda.is_available()
interpreted = pytest.mark.skipif(on_gpu, reason="small shapes, for the interpreter")


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not on_gpu, reason="needs a GPU")(test))


TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2}


class Case:
    """Inputs of one call, from a seed; fp64 and fp32 copies hold the very same numbers."""

    def __init__(
        self,
        batch: int = 1,
        queries: int = 3,
        heads: int = 16,
        width: int = 64,
        keys: int = 40,
        slots: int = 70,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        seed: int = 0,
        pairs: int = 0,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        self.q = (scale * normal(batch, queries, heads, width)).to(dtype)
        self.keys = (scale * normal(batch, keys, width)).to(dtype)
        self.slots = torch.randint(
            -1, keys, (batch, queries, slots), generator=generator, device=device
        ).int()
        self.sink = normal(heads)
        self.dout = normal(batch, queries, heads, width).to(dtype)
        self.rotation = None
        if pairs:
            angles = 3 * normal(batch, queries, pairs)
            self.rotation = Rotation(angles.cos(), angles.sin())

    def kernel(self, **options: bool) -> list[Tensor]:
        """Output and gradients of q, keys and sink, by the kernels."""
        q, keys, sink = (x.detach().requires_grad_() for x in (self.q, self.keys, self.sink))
        out = kernels.sparse_attention(q, keys, self.slots, sink, self.rotation, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, keys, sink), self.dout)]

    def expected(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The same by the reference in `dtype`."""
        q, keys, sink = (
            x.detach().to(dtype).requires_grad_() for x in (self.q, self.keys, self.sink)
        )
        out = reference(q, keys, self.slots, sink)
        if self.rotation is not None:
            out = rotate(out, Rotation(*(x.to(dtype) for x in self.rotation)), inverse=True)
        return [out.detach(), *torch.autograd.grad(out, (q, keys, sink), self.dout.to(dtype))]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    """||found - expected|| / ||expected|| of each tensor; the difference itself where that is 0."""
    return [
        ((f.to(e.dtype) - e).norm() / (e.norm() if e.norm() > 0 else 1)).item()
        for f, e in zip(found, expected, strict=True)
    ]


def check(case: Case, tolerance: float | None = None, **options: bool) -> None:
    tolerance = tolerance or TOLERANCES[case.q.dtype]
    found = case.kernel(**options)
    for name, tensor, error in zip(
        ("out", "dq", "dkeys", "dsink"), found, errors(found, case.expected()), strict=True
    ):
        assert error < tolerance, f"{name}: {error:.1e}"
        assert tensor.isfinite().all(), name


# Numbers


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_output_and_gradients_are_the_references(dtype, deterministic):
    check(Case(batch=2, queries=2, dtype=dtype), deterministic=deterministic)


@interpreted
@pytest.mark.parametrize(("slots", "keys", "width"), [(1, 1, 64), (64, 7, 128), (129, 30, 32)])
def test_lists_need_not_fill_blocks(slots, keys, width):
    check(Case(slots=slots, keys=keys, width=width, queries=2))


@interpreted
def test_an_empty_list_gives_zero_and_no_gradient():
    case = Case()
    case.slots[:, 0] = -1
    out, dq, dkeys, _ = case.kernel()
    assert not out[:, 0].any()
    assert not dq[:, 0].any()
    check(case)
    case.slots[:] = -1
    assert not any(x.any() for x in case.kernel())
    assert dkeys.any()


@interpreted
def test_a_list_without_places_is_empty():
    case = Case(slots=0)
    assert not any(x.any() for x in case.kernel(check_slots=True))


@interpreted
def test_blocks_before_and_after_the_used_part_are_skipped_rightly():
    case = Case(slots=200, queries=3)
    case.slots[:, :, :] = -1
    case.slots[:, 0, 130:150] = torch.arange(20, dtype=torch.int32)
    case.slots[:, 1, 63] = 3
    case.slots[:, 2, 199] = 5
    check(case)


@interpreted
def test_documents_of_one_token_see_themselves_only():
    case = Case(queries=4, keys=4)
    case.slots = window_slots(torch.zeros(1, 4, dtype=torch.long), 8)
    check(case)
    out = kernels.sparse_attention(
        case.q, case.keys, case.slots, torch.full_like(case.sink, -torch.inf)
    )
    torch.testing.assert_close(out, case.keys.unsqueeze(2).expand_as(out))


@interpreted
def test_scores_in_the_thousands_neither_overflow_nor_vanish():
    # Such a score is exact to 1e-4 only in fp32, and so is its exponential.
    check(Case(scale=25.0, queries=2), 1e-3, deterministic=True)


@interpreted
def test_scores_in_the_thousands_in_bf16_give_the_output_and_the_value_gradient():
    # Nearly all weight is on one key: what is left of q's gradient is the output's rounding.
    case = Case(scale=25.0, queries=2, dtype=torch.bfloat16)
    (out, dq, dkeys, _), expected = case.kernel(), case.expected()
    assert max(errors([out, dkeys], [expected[0], expected[2]])) < 2e-2
    assert dq.isfinite().all()


@interpreted
def test_a_key_listed_twice_counts_twice():
    case = Case(queries=2, keys=5, slots=12)
    check(case, deterministic=True)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_is_undone_in_the_same_pass(dtype):
    check(Case(batch=2, queries=2, dtype=dtype, width=128, pairs=16))


@interpreted
def test_a_missing_sink_is_minus_infinity():
    case = Case(queries=2)
    case.sink[::2] = -torch.inf
    found, expected = case.kernel(), case.expected()
    assert max(errors(found[:3], expected[:3])) < TOLERANCES[torch.float32]
    assert not found[3][::2].any()


# Determinism


def permuted(case: Case) -> Case:
    """The same queries in another order, so that the keys' gradients add up in another order."""
    order = torch.randperm(case.q.shape[1], generator=torch.Generator().manual_seed(1))
    other = Case.__new__(Case)
    other.__dict__ = dict(case.__dict__)
    for name in ("q", "slots", "dout"):
        setattr(other, name, getattr(case, name)[:, order.to(case.q.device)])
    return other


@interpreted
def test_deterministic_key_gradients_do_not_depend_on_the_order_of_queries():
    case = Case(queries=12, keys=6, slots=20)
    other = permuted(case)
    torch.testing.assert_close(
        other.kernel(deterministic=True)[2], case.kernel(deterministic=True)[2], rtol=0, atol=0
    )
    # That this order does matter to sums in fp32:
    assert not torch.equal(other.kernel()[2], case.kernel()[2])


@interpreted
@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_fixed_point_sums_fit_gradients_of_any_size(scale):
    case = Case(queries=2)
    case.dout *= scale
    check(case, deterministic=True)


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_gradient_that_is_not_finite_makes_deterministic_key_gradients_nan():
    case = Case(queries=2)
    case.dout[0, 0, 0, 0] = torch.inf
    assert case.kernel(deterministic=True)[2].isnan().all()


# As an op


@interpreted
def test_under_checkpointing_gradients_are_the_same():
    case = Case(queries=2)
    q, keys, sink = (x.clone().requires_grad_() for x in (case.q, case.keys, case.sink))
    out = checkpoint(kernels.sparse_attention, q, keys, case.slots, sink, None, use_reentrant=False)
    grads = torch.autograd.grad(out, (q, keys, sink), case.dout)
    for found, expected in zip(grads, case.kernel()[1:], strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@interpreted
def test_checkpointing_can_save_it_by_name(monkeypatch):
    num_forwards = 0
    run_forward = kernels.run_forward

    def counted(*arguments):
        nonlocal num_forwards
        num_forwards += 1
        return run_forward(*arguments)

    monkeypatch.setattr(kernels, "run_forward", counted)
    saved = {torch.ops.ppruntime.sparse_attention.default}

    def policy(_, op, *arguments, **options):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    case = Case(queries=1)
    q = case.q.clone().requires_grad_()

    def forwards(**options):
        nonlocal num_forwards
        num_forwards = 0
        out = checkpoint(
            lambda q: kernels.sparse_attention(2 * q, case.keys, case.slots, case.sink).sin(),
            q,
            use_reentrant=False,
            **options,
        )
        out.sum().backward()
        return num_forwards

    assert forwards() == 2
    assert forwards(context_fn=lambda: create_selective_checkpoint_contexts(policy)) == 1


@interpreted
def test_the_registration_is_consistent():
    case = Case(queries=1, pairs=8)
    arguments = (
        case.q.requires_grad_(),
        case.keys.requires_grad_(),
        case.slots,
        case.sink.requires_grad_(),
        *case.rotation,
        True,
    )
    op = torch.ops.ppruntime.sparse_attention.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@interpreted
def test_a_compiled_graph_holds_the_op_as_one_node():
    case = Case(queries=1)
    found = []

    def backend(graph, _):
        found.extend(n.target for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    compiled = torch.compile(kernels.sparse_attention, backend=backend, fullgraph=True)
    out = compiled(case.q, case.keys, case.slots, case.sink)
    torch.testing.assert_close(out, case.kernel()[0], rtol=0, atol=0)
    assert torch.ops.ppruntime.sparse_attention.default in found


# Inputs


@interpreted
def test_slots_may_be_int64_and_nothing_need_be_contiguous():
    case = Case(batch=2, queries=2)
    expected = case.kernel()
    case.slots = case.slots.long()
    for name in ("q", "keys", "slots", "dout"):
        tensor = getattr(case, name)
        setattr(case, name, tensor.transpose(0, 1).contiguous().transpose(0, 1))
        assert not getattr(case, name).is_contiguous()
    for found, tensor in zip(case.kernel(), expected, strict=True):
        torch.testing.assert_close(found, tensor, rtol=0, atol=0)


@interpreted
def test_no_queries_give_no_output_and_no_gradient():
    out, dq, dkeys, dsink = Case(queries=0).kernel(check_slots=True)
    assert out.shape == dq.shape == (1, 0, 16, 64)
    assert not dkeys.any()
    assert not dsink.any()


@interpreted
def test_a_slot_that_is_no_key_is_an_error_if_checked_and_nan_if_not():
    case = Case(queries=2)
    case.slots[0, 1, 3] = 40
    with pytest.raises(IndexError, match="slots run from -1 to 40, but there are 40 keys"):
        case.kernel(check_slots=True)
    out = case.kernel()[0]
    assert out[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


@interpreted
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("q", torch.zeros(2, 16, 64), "dimensions"),
        ("q", torch.zeros(1, 3, 12, 64), "sink is"),
        ("q", torch.zeros(1, 3, 16, 64).half(), "bfloat16"),
        ("keys", torch.zeros(1, 40, 64).bfloat16(), "both have to be bfloat16"),
        ("keys", torch.zeros(1, 0, 64), "at least one"),
        ("keys", torch.zeros(2, 40, 64), r"keys is \[2, 40, 64\]"),
        ("slots", torch.zeros(1, 2, 70), r"slots is \[1, 2, 70\]"),
        ("sink", torch.zeros(8), r"sink is \[8\]"),
        ("rotation", (torch.ones(1, 3, 17), torch.ones(1, 3, 17)), "P at most 16"),
        ("rotation", (torch.ones(1, 3, 4), torch.ones(1, 3, 4).half()), "float32"),
    ],
)
def test_bad_inputs_are_named(name, value, message):
    case = Case()
    setattr(case, name, value)
    with pytest.raises(ValueError, match=message):
        case.kernel()


def test_what_cannot_run_says_why():
    assert unavailable_reason("triton") is None
    with pytest.raises(ValueError, match="'tritn'; there are: triton"):
        unavailable_reason("tritn")


# The Gluon kernels, simulated


@pytest.fixture
def hopper(monkeypatch):
    """The op runs the Gluon kernels, on any inputs."""
    from ppruntime.models.kernels import sparse_attention_hopper

    for name in ("forward_kernel", "backward_kernel"):
        kernel = getattr(sparse_attention_hopper, name)
        monkeypatch.setattr(sparse_attention_hopper, name, simulated(kernel))
    monkeypatch.setattr(kernels, "fits_hopper", lambda *_: True)


@interpreted
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 2, "queries": 5},
        {"pairs": 16, "batch": 2, "width": 128},
        {"slots": 1, "keys": 1},
        {"slots": 64, "keys": 9},
        {"slots": 257, "keys": 33},
    ],
    ids=str,
)
def test_simulated_gluon_kernels_give_the_references_numbers(sizes, deterministic):
    case = Case(dtype=torch.bfloat16, **sizes)
    if case.slots.shape[-1] > 1:
        case.slots[:, 0] = -1
        case.slots[:, 1, : case.slots.shape[-1] * 2 // 3] = -1
    check(case, deterministic=deterministic)


@interpreted
@pytest.mark.usefixtures("hopper")
def test_simulated_gluon_kernels_treat_odd_inputs_as_the_others_do():
    case = Case(dtype=torch.bfloat16, queries=2)
    other = permuted(case)
    key_gradients = [x.kernel(deterministic=True)[2] for x in (case, other)]
    assert torch.equal(*key_gradients)
    case.sink[:] = -torch.inf
    case.slots[:, 0] = -1
    found = case.kernel()
    assert all(x.isfinite().all() for x in found)
    assert not found[3].any()
    case.slots[0, 1, 3] = 40
    out = case.kernel()[0]
    assert out[0, 1].isnan().all()
    assert not out[0, 0].any()


@pytest.mark.compiles
@pytest.mark.slow
def test_gluon_kernels_compile_to_wide_products_and_copies_and_fit(tmp_path):
    # In a process of its own: the interpreter leaves the language changed.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compile_sparse_attention.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert set(found) == {"forward", "backward", "backward, deterministic"}
    for name, kernel in found.items():
        assert kernel["shared_bytes"] <= 227 * 1024, name
        assert kernel["local_bytes"] <= 256, f"{name} spills"
        assert kernel["wgmma"].get("m64n256k16", 0) == 4, name
        assert kernel["copies"].keys() == {"cp.async.cg 16"}, f"{name}: copies of 16 bytes each"
    assert found["forward"]["wgmma"]["m64n32k16"] == 32, "scores are worked out once"
    assert found["backward"]["wgmma"]["m64n64k16"] == 64, "scores are worked out once"


# At the models' width, on a GPU


def wide_case(**sizes) -> Case:
    """V4.1's heads and width in bf16, 640 slots of which a tenth are empty."""
    sizes = {"queries": 130, "keys": 900, "slots": 640, "pairs": 32, **sizes}
    case = Case(heads=64, width=512, dtype=torch.bfloat16, device="cuda", **sizes)
    is_empty = torch.rand(case.slots.shape, device="cuda") < 0.1
    case.slots.masked_fill_(is_empty, -1)
    return case


def check_wide(case: Case, **options: bool) -> None:
    found, expected = case.kernel(**options), case.expected(torch.float32)
    for name, error in zip(("out", "dq", "dkeys", "dsink"), errors(found, expected), strict=True):
        assert error < 6e-3, f"{name}: {error:.1e}"


@pytest.fixture(params=["triton", "gluon"])
def family(request, monkeypatch):
    """Both kinds of kernels in turn."""
    if request.param == "triton":
        monkeypatch.setattr(kernels, "fits_hopper", lambda *_: False)
    elif on_gpu and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the Gluon kernels are for Hopper")


@gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"batch": 2, "queries": 33},
        {"slots": 128},
        {"slots": 1, "keys": 1},
        {"slots": 77, "keys": 5},
        {"slots": 1000, "queries": 40},
        {"pairs": 0},
    ],
    ids=str,
)
def test_at_full_width_output_and_gradients_are_the_references(sizes, deterministic):
    check_wide(wide_case(**sizes), deterministic=deterministic)


@gpu
@pytest.mark.usefixtures("family")
def test_at_full_width_empty_lists_and_documents_of_one_token_work():
    case = wide_case(queries=65, keys=65)
    case.slots[:, 3:9] = -1
    case.slots[:, 20, :600] = -1
    case.slots[:, 21, 70:] = -1
    check_wide(case)
    case.slots = window_slots(torch.zeros(1, 65, dtype=torch.long, device="cuda"), 128)
    check_wide(case)
    case.slots = torch.full_like(case.slots, -1)
    assert not any(x.any() for x in case.kernel())


@gpu
@pytest.mark.usefixtures("family")
def test_at_full_width_one_key_may_take_nearly_all_weight():
    case = wide_case(scale=3.0)
    found, expected = case.kernel(), case.expected(torch.float32)
    assert max(errors([found[0], found[2]], [expected[0], expected[2]])) < 2e-2
    assert all(x.isfinite().all() for x in found)


@gpu
@pytest.mark.usefixtures("family")
def test_on_a_gpu_all_but_the_fast_key_gradients_repeat_bitwise():
    case = wide_case(queries=1000, keys=300)
    out, dq, dkeys, dsink = case.kernel(deterministic=True)
    for _ in range(3):
        for found, tensor in zip(
            case.kernel(deterministic=True), (out, dq, dkeys, dsink), strict=True
        ):
            assert torch.equal(found, tensor)
    out_again, dq_again, _, dsink_again = case.kernel()
    assert torch.equal(out_again, out)
    assert torch.equal(dq_again, dq)
    assert torch.equal(dsink_again, dsink)


@gpu
@pytest.mark.usefixtures("family")
def test_on_a_gpu_the_order_of_queries_does_not_matter_to_deterministic_key_gradients():
    case = wide_case(queries=1000, keys=300, pairs=0)
    other = permuted(case)
    assert torch.equal(other.kernel(deterministic=True)[2], case.kernel(deterministic=True)[2])


@gpu
@pytest.mark.usefixtures("family")
def test_on_a_gpu_compiled_and_checkpointed_are_as_eager():
    case = wide_case()
    expected = case.kernel(deterministic=True)

    def attend(q, keys, sink):
        return kernels.sparse_attention(
            q, keys, case.slots, sink, case.rotation, deterministic=True
        )

    for function in (
        torch.compile(attend, fullgraph=True),
        lambda *inputs: checkpoint(attend, *inputs, use_reentrant=False),
    ):
        inputs = [x.clone().requires_grad_() for x in (case.q, case.keys, case.sink)]
        out = function(*inputs)
        for found, tensor in zip(
            (out, *torch.autograd.grad(out, inputs, case.dout)), expected, strict=True
        ):
            assert torch.equal(found, tensor)


@gpu
def test_on_a_gpu_only_bf16_is_taken():
    case = Case(device="cuda")
    with pytest.raises(ValueError, match=r"q is torch.float32; on a GPU the kernels take bfloat16"):
        case.kernel()


# The packages behind the same op


class DocumentedPackages:
    """FlashMLA and cuDNN's frontend as their documentation has them, in plain PyTorch."""

    @staticmethod
    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None):
        assert indices.dtype is torch.int32
        assert indices.shape[1] == kv.shape[1] == 1
        assert indices.shape[2] % 128 == 0
        assert all(x.is_contiguous() for x in (q, kv, indices, attn_sink))
        gathered, scores = DocumentedPackages._scores(q, kv[:, 0], indices[:, 0], sm_scale)
        lse = scores.logsumexp(-1)
        out = (scores - torch.logaddexp(lse, attn_sink)[..., None]).exp() @ gathered
        is_empty = lse == -torch.inf
        return out.to(q.dtype), scores.amax(-1), lse.masked_fill(is_empty, torch.inf)

    @staticmethod
    def sparse_attention_backward_wrapper(q, kv, out, dout, lse, sink, idxs, softmax_scale):
        assert all(x.is_contiguous() for x in (q, kv, out, dout, lse, sink, idxs))
        gathered, scores = DocumentedPackages._scores(q, kv, idxs, softmax_scale)
        total = torch.logaddexp(lse, sink)
        weights = (scores - total[..., None]).exp()
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = weights * (dout @ gathered.transpose(1, 2) - delta) * softmax_scale
        per_slot = weights.transpose(1, 2) @ dout + dscores.transpose(1, 2) @ q
        dkv = torch.zeros_like(kv)
        is_key = (idxs >= 0) & (idxs < len(kv))
        dkv.index_add_(0, idxs[is_key].long(), per_slot[is_key])
        d_sink = -(delta[..., 0] * (sink - total).exp()).sum(0)
        return {"dq": dscores @ gathered, "dkv": dkv, "d_sink": d_sink}

    @staticmethod
    def _scores(q, kv, indices, scale):
        is_key = (indices >= 0) & (indices < len(kv))
        gathered = kv[torch.where(is_key, indices, 0).long()] * is_key[..., None]
        scores = q @ gathered.transpose(1, 2) * scale
        return gathered, scores.masked_fill(~is_key[:, None], -torch.inf)


@interpreted
@pytest.mark.parametrize("pairs", [0, 16])
def test_the_packages_get_what_they_want_and_their_results_become_the_references(
    pairs, monkeypatch
):
    monkeypatch.setattr(sparse_attention_library, "_flash_mla", lambda: DocumentedPackages)
    monkeypatch.setattr(sparse_attention_library, "_dsa", lambda: DocumentedPackages)
    case = Case(batch=2, queries=3, pairs=pairs)
    case.slots[1, 2] = -1
    case.slots[0, 0, 5:] = -1
    check(case, library=True)
    with pytest.raises(ValueError, match="never deterministic"):
        case.kernel(library=True, deterministic=True)


@interpreted
@pytest.mark.parametrize("is_output", [False, True])
def test_the_packages_backward_leaves_the_output_and_its_gradient_as_they_were(
    is_output, monkeypatch
):
    """It turns both where they lie. Others may hold them: the output's next reader does."""
    monkeypatch.setattr(sparse_attention_library, "_flash_mla", lambda: DocumentedPackages)
    monkeypatch.setattr(sparse_attention_library, "_dsa", lambda: DocumentedPackages)
    case = Case(batch=2, queries=3, pairs=16)
    inputs = [x.clone().requires_grad_() for x in (case.q, case.keys, case.sink)]

    def attend():
        return kernels.sparse_attention(
            *inputs[:2], case.slots, inputs[2], case.rotation, library=True
        )

    out = attend()
    dout = out.detach() if is_output else case.dout
    expected = torch.autograd.grad(attend(), inputs, dout.clone())
    before = out.detach().clone(), dout.clone(), out._version, dout._version
    found = torch.autograd.grad(out, inputs, dout)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(out, before[0])
    assert torch.equal(dout, before[1])
    assert (out._version, dout._version) == before[2:]


@gpu
@pytest.mark.parametrize(
    "sizes",
    [{}, {"batch": 2, "queries": 33}, {"slots": 128}, {"slots": 77, "keys": 5}, {"pairs": 0}],
    ids=str,
)
def test_at_full_width_the_packages_give_the_references_numbers(sizes):
    reason = sparse_attention_library.unavailable_reason(torch.device("cuda"), torch.bfloat16)
    if reason is not None:
        pytest.skip(reason)
    check_wide(wide_case(**sizes), library=True)
    case = wide_case(**sizes)
    case.slots[:, 3:5] = -1
    found = case.kernel(library=True)
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, 3:5].any()
    assert not found[1][:, 3:5].any()
