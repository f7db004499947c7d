"""The mHC kernels against the readable reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import measured_activations
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ppruntime.models.activation_bytes import saved_bytes
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import preset, unit_specs
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels import mhc as kernels
from ppruntime.models.kernels import mhc_kernels
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.mhc import Coefficients, HyperConnection
from ppruntime.models.norm import RMSNorm
from ppruntime.models.residual import REFERENCE, Residual, residual
from ppruntime.models.units import build_unit

TESTS = Path(__file__).parents[1]
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
FUSED = Residual(read=kernels.read, write=kernels.write)
interpreted = pytest.mark.skipif(on_gpu, reason="small shapes, for the interpreter")


class Case:
    """One sublayer, tanh, between read and write, with every parameter off its constant."""

    def __init__(
        self,
        tokens=(1, 2),
        width=40,
        streams=4,
        dtype=torch.float32,
        own=False,
        scale=1.0,
        iters=3,
    ):
        torch.manual_seed(0)
        dims = replace(preset("tiny"), hidden_size=width, num_streams=streams, sinkhorn_iters=iters)
        self.connection = HyperConnection(dims, device=DEVICE)
        self.norm = RMSNorm(width, dims.norm_eps, device=DEVICE, dtype=dtype)
        with torch.no_grad():
            self.connection.projection.weight.normal_(std=0.1)
            self.connection.base.normal_()
            self.connection.scale.uniform_(0.5, 2)
            self.norm.weight.uniform_(0.5, 1.5)
        shape = (*tokens, streams, width)
        self.streams = (scale * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()
        self.mix = None if own else torch.rand(shape[:-1], device=DEVICE).requires_grad_()
        self.douts = (torch.randn(shape, device=DEVICE), torch.randn(shape[:-1], device=DEVICE))

    def inputs(self) -> list[Tensor]:
        parameters = [*self.connection.parameters(), *self.norm.parameters()]
        return [self.streams, *([] if self.mix is None else [self.mix]), *parameters]

    def outputs(self, functions: Residual) -> tuple[Tensor, Tensor]:
        x, handle, coefficients = functions.read(self.connection, self.norm, self.streams, self.mix)
        return functions.write(handle, torch.tanh(x), coefficients), coefficients.pre_BTS

    def results(self, functions: Residual) -> list[Tensor]:
        """Streams, the next mix, and the gradients of all inputs."""
        out, pre = self.outputs(functions)
        douts = (self.douts[0].to(out.dtype), self.douts[1].to(pre.dtype))
        grads = torch.autograd.grad((out, pre), self.inputs(), douts)
        return [out.detach(), pre.detach(), *grads]

    def expected(self) -> list[Tensor]:
        """By the reference in fp64."""
        wide = Case.__new__(Case)
        wide.__dict__ = dict(self.__dict__)
        wide.connection = HyperConnection(self.connection.dims, device=DEVICE, dtype=torch.float64)
        wide.connection.load_state_dict(self.connection.state_dict())
        wide.norm = RMSNorm(self.norm.weight.numel(), self.norm.eps, dtype=torch.float64)
        wide.norm.weight = torch.nn.Parameter(self.norm.weight.detach().double())
        wide.streams = self.streams.detach().double().requires_grad_()
        wide.mix = None if self.mix is None else self.mix.detach().double().requires_grad_()
        return wide.results(REFERENCE)


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        ((f.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)).item()
        for f, e in zip(found, expected, strict=True)
    ]


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"iters": 20},
        {"own": True, "tokens": (2, 1)},
        {"streams": 2, "width": 130, "tokens": (1, 17), "iters": 2},
        {"scale": 3e4, "iters": 2},
        {"scale": 1e-9, "iters": 1, "own": True},
        {"streams": 8, "width": 24, "tokens": (1, 3), "iters": 2},
        {"width": 64, "tokens": (1, 1), "iters": 2},
    ],
    ids=str,
)
def test_in_fp32_all_results_are_fp64s_to_fp32s_last_bits(options):
    case = Case(**options)
    found = case.results(FUSED)
    errors = distances(found, case.expected())
    assert max(errors) < 3e-6, errors
    assert all(result.isfinite().all() for result in found)


@interpreted
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("width", [128, 130])  # blocks of channels that end with a row, or past it
def test_parts_of_the_channels_and_tokens_add_up(own, width, monkeypatch):
    sizes = {"_SHARE": 64, "_BACK_SHARE": 64, "_TOKEN_SHARE": 16, "_COEFFICIENT_TOKENS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(f"ppruntime.models.kernels.mhc.{name}", size)
    case = Case(tokens=(1, 35), width=width, iters=2, own=own)
    errors = distances(case.results(FUSED), case.expected())
    assert max(errors) < 3e-6, errors


@interpreted
def test_a_sublayer_that_nothing_is_written_after_has_gradients():
    case = Case()
    x, _, _ = FUSED.read(case.connection, case.norm, case.streams, case.mix)
    expected, _, _ = REFERENCE.read(case.connection, case.norm, case.streams, case.mix)
    inputs = [case.streams, case.mix, case.norm.weight]
    found = torch.autograd.grad(x, inputs, torch.ones_like(x))
    grads = torch.autograd.grad(expected, inputs, torch.ones_like(x))
    assert max(distances(list(found), list(grads))) < 3e-6


@pytest.mark.parametrize(("own", "scale"), [(False, 1.0), (True, 1.0), (False, 1e4)])
def test_in_bf16_errors_are_the_references_own(own, scale):
    tokens, width = ((2, 300), 1000) if on_gpu else ((1, 2), 72)
    case = Case(tokens=tokens, width=width, dtype=torch.bfloat16, own=own, scale=scale)
    expected = case.expected()
    found, reference = case.results(FUSED), case.results(REFERENCE)
    assert [f.dtype for f in found] == [r.dtype for r in reference]
    assert [f.shape for f in found] == [r.shape for r in reference]
    for error, allowed in zip(
        distances(found, expected), distances(reference, expected), strict=True
    ):
        assert error < 2.5 * allowed + 1e-5


@interpreted
def test_a_weight_gradient_that_is_put_off_is_the_same_to_the_bit():
    case = Case(dtype=torch.bfloat16)
    *_, weight_grad, _ = case.results(FUSED)
    queue = WeightGradQueue()
    set_queue(case.connection, queue)
    queue.deferring = True
    out, pre = case.outputs(FUSED)
    douts = [case.douts[0].bfloat16(), case.douts[1]]
    torch.autograd.backward((out, pre), douts)
    assert case.connection.projection.weight.grad is None
    (task,) = queue.pop()
    task()
    assert torch.equal(case.connection.projection.weight.grad, weight_grad)


@interpreted
def test_under_checkpointing_gradients_are_the_same():
    case = Case()
    expected = case.results(FUSED)
    out, pre = checkpoint(case.outputs, FUSED, use_reentrant=False)
    grads = torch.autograd.grad((out, pre), case.inputs(), case.douts)
    for found, grad in zip(grads, expected[2:], strict=True):
        assert torch.equal(found, grad)


@interpreted
def test_without_tokens_there_is_nothing():
    case = Case(tokens=(1, 0))
    out, pre, dstreams, dmix, *others = case.results(FUSED)
    assert [t.numel() for t in (out, pre, dstreams, dmix)] == [0] * 4
    assert not any(grad.any() for grad in others)


@interpreted
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_a_unit_has_the_references_carry_and_keeps_the_planned_bytes(name):
    dims = replace(preset(name), sinkhorn_iters=3)
    spec = next(s for s in unit_specs(dims)[2:] if s.kind == "moe")
    before = unit_specs(dims)[unit_specs(dims).index(spec) - 1]
    unit = build_unit(dims, spec)
    init_parameters(unit, spec.name, seed=0)
    ids = torch.arange(3).view(1, 3)
    blank = measured_activations.blank_carry(dims, before, 1, 3, "float32")
    fields = {
        field: torch.randn(tensor.shape).to(tensor.dtype).requires_grad_(tensor.requires_grad)
        for field, tensor in blank._asdict().items()
        if isinstance(tensor, Tensor)
    }
    batch = MicroBatch(ids, ids, ids)
    expected = unit(Carry(**fields), batch)
    unit.residual = FUSED
    measured = measured_activations.measure([unit], Carry(**fields), batch)
    assert measured.own_bytes == saved_bytes(dims, spec, 1, 3, "float32", mhc="triton")
    torch.testing.assert_close(unit(Carry(**fields), batch).streams, expected.streams)


def test_what_the_kernels_do_not_take_is_refused():
    case = Case(streams=3)
    with pytest.raises(ValueError, match="3 streams; the kernels take 2, 4 or 8"):
        case.outputs(FUSED)
    case = Case()
    case.norm.double()
    with pytest.raises(ValueError, match=r"norm's gain torch\.float64"):
        case.outputs(FUSED)
    case = Case()
    case.mix = case.mix.detach().bfloat16()
    with pytest.raises(ValueError, match="mix have to be float32"):
        case.outputs(FUSED)


def test_shapes_that_do_not_belong_together_are_refused():
    case = Case()
    case.streams = case.streams.detach()[..., :-1]
    with pytest.raises(ValueError, match=r"streams are \[1, 2, 4, 39\], .* \[B, T, 4, 40\]"):
        case.outputs(FUSED)
    case = Case()
    case.mix = case.mix.detach()[:, 1:]
    with pytest.raises(ValueError, match=r"the mix is \[1, 1, 4\], .* take \[1, 2, 4\]"):
        case.outputs(FUSED)
    case = Case()
    case.norm = RMSNorm(39, 1e-6, device=DEVICE)
    with pytest.raises(ValueError, match=r"gain is \[39\] of 40 wide"):
        case.outputs(FUSED)
    handle, y = torch.ones(1, 2, 4, 40), torch.ones(1, 2, 40)
    weights = Coefficients(torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.ones(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"take y \[1, 2, 40\], .* got \[1, 1, 40\]"):
        kernels.write(handle, y[:, 1:], weights)
    with pytest.raises(ValueError, match=r"y is torch\.float64"):
        kernels.write(handle, y.double(), weights)
    with pytest.raises(ValueError, match=r"post is torch\.bfloat16"):
        kernels.write(handle, y, weights._replace(post_BTS=torch.ones(1, 2, 4).bfloat16()))


@interpreted
def test_torch_accepts_the_ops():
    case, checks = Case(), ("test_schema", "test_faketensor")
    streams, mix = case.streams.detach().flatten(0, 1), case.mix.detach().flatten(0, 1)
    weights = (case.connection.projection.weight, case.connection.base, case.connection.scale)
    weights = (*(t.detach() for t in weights), case.norm.weight.detach())
    constants, y = (1e-6, 1e-6, 2), torch.randn(2, 40)
    for own in (None, mix):
        torch.library.opcheck(
            kernels._read, (streams, own, *weights, *constants), test_utils=checks
        )
    x, z, projected, inverse, _, post, comb = kernels._read(streams, mix, *weights, *constants)
    torch.library.opcheck(kernels._write, (streams, y, post, comb), test_utils=checks)
    arguments = (torch.randn_like(streams), streams, y, post, comb)
    torch.library.opcheck(kernels._write_backward, arguments, test_utils=checks)
    for dpre, is_own, wants_mix in ((None, False, True), (mix, True, False)):
        arguments = (
            x, streams, dpre, post, comb, streams, mix, *weights, z, projected, inverse, comb,
            *constants, is_own, wants_mix,
        )  # fmt: skip
        torch.library.opcheck(kernels._read_backward, arguments, test_utils=checks)
    operand = torch.randn(2, 2 * projected.shape[1])
    torch.library.opcheck(kernels._weight_grad, (operand, streams), test_utils=checks)


@interpreted
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("own", [False, True])
def test_compiled_it_gives_the_same_bits_with_and_without_a_queue(own):
    case = Case(own=own)
    expected = case.results(FUSED)
    for queue in (None, WeightGradQueue()):
        set_queue(case.connection, queue)
        torch._dynamo.reset()
        run = torch.compile(case.outputs, backend="aot_eager", dynamic=False)
        out, pre = run(FUSED)
        grads = torch.autograd.grad((out, pre), case.inputs(), case.douts)
        assert all(map(torch.equal, (out, pre, *grads), expected))
    torch._dynamo.reset()


def test_a_name_gives_the_functions_that_can_run_there(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert residual("reference", cuda) is REFERENCE
    assert residual("auto", cpu) is REFERENCE
    assert residual("auto", cuda) == residual("triton", cuda) == FUSED
    monkeypatch.setattr("ppruntime.models.residual.unavailable_reason", lambda _: "no device")
    assert residual("auto", cuda) is REFERENCE
    with pytest.raises(RuntimeError, match=r'kernels\.mhc = "triton": no device; "reference" r'):
        residual("triton", cuda)


@pytest.mark.compiles
@pytest.mark.slow  # about 15 s: the kernels of compile_layer_parts.py at V4.1's width
def test_kernels_compile_for_hopper_without_spills():
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    run = subprocess.run(
        [sys.executable, str(TESTS / "compile_layer_parts.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    kernels_of = json.loads(run.stdout)
    assert len(kernels_of) == 27
    source = Path(mhc_kernels.__file__)
    through_rms = {
        f"{source.name}:{number}"
        for number, line in enumerate(source.read_text().splitlines(), start=1)
        if "tl.store(through_rms_ptr" in line
    }
    assert through_rms
    for name, kernel in kernels_of.items():
        assert kernel["spills"] == 0, name
        assert kernel["shared_bytes"] <= 227 * 1024, name
        # The coefficients' gradients are 96 bytes a token.
        allowed = 4 if kernel["name"] == "coefficients_backward_kernel" else 0
        assert kernel["narrow_accesses"] <= allowed, name
        # Its sums are of products that a thread adds before they are rounded: copies differ.
        assert not through_rms.intersection(kernel["copies_moved"]), name
        # Three programs of 128 threads on a multiprocessor, or two of 256.
        most = {"project_kernel": 168, "read_backward_kernel": 128}
        assert kernel["registers"] <= most.get(kernel["name"], 255), name


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize(("width", "own"), [(5120, False), (4096, True)])
@pytest.mark.parametrize("tokens", [(1, 4096), (3, 1001), (1, 1)])
def test_at_full_width_on_a_gpu(width, own, tokens):
    case = Case(tokens=tokens, width=width, dtype=torch.bfloat16, own=own)
    expected = case.expected()
    found, reference = case.results(FUSED), case.results(REFERENCE)
    for error, allowed in zip(
        distances(found, expected), distances(reference, expected), strict=True
    ):
        # Sums over 20,480 channels on tensor cores: the first run of this test saw 6e-5.
        assert error < 2.5 * allowed + 1.5e-4
    again = case.results(FUSED)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("streams", [2, 8])
def test_other_numbers_of_streams_on_a_gpu(streams, own):
    case = Case(tokens=(1, 333), width=1024, streams=streams, dtype=torch.bfloat16, own=own)
    found, expected = case.results(FUSED), case.expected()
    for error, allowed in zip(
        distances(found, expected), distances(case.results(REFERENCE), expected), strict=True
    ):
        assert error < 2.5 * allowed + 1.5e-4
