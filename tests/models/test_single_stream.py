"""One residual stream in place of mHC's: its functions, its kernels, and models made of it."""

from __future__ import annotations

import measured_activations
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from whole_model import build_units, named_grads, random_batch, run

from ppruntime.models.activation_bytes import saved_bytes
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import boundary_bytes, changed, preset, unit_specs, validate
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels import single_stream as kernels
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.norm import RMSNorm
from ppruntime.models.residual import ONE_STREAM, Residual, residual
from ppruntime.models.single_stream import LayerScale, PostGate
from ppruntime.models.units import build_unit

TYPES = ("gated", "layerscale")
on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
FUSED = Residual(read=kernels.read, write=kernels.write)
interpreted = pytest.mark.skipif(on_gpu, reason="small shapes, for the interpreter")


class Case:
    """One sublayer, tanh, between read and write, with every parameter off its constant."""

    def __init__(self, residual_type, tokens=(2, 3), width=40, dtype=torch.float32, scale=1.0):
        torch.manual_seed(0)
        self.dims = changed(preset("tiny"), hidden_size=width, residual_type=residual_type)
        self.kind = PostGate if residual_type == "gated" else LayerScale
        self.connection = self.kind(self.dims, device=DEVICE)
        self.norm = RMSNorm(width, self.dims.norm_eps, device=DEVICE, dtype=dtype)
        with torch.no_grad():
            for parameter in (*self.connection.parameters(), self.norm.weight):
                parameter.uniform_(0.5, 1.5)
            if isinstance(self.connection, PostGate):
                self.connection.projection.weight.normal_(std=0.1)
        shape = (*tokens, 1, width)
        self.stream = (scale * torch.randn(shape, device=DEVICE)).to(dtype).requires_grad_()
        self.dout = torch.randn(shape, device=DEVICE)

    def inputs(self) -> list[Tensor]:
        return [self.stream, *self.connection.parameters(), self.norm.weight]

    def output(self, functions: Residual) -> Tensor:
        x, handle, factor = functions.read(self.connection, self.norm, self.stream, None)
        return functions.write(handle, torch.tanh(x), factor)

    def results(self, functions: Residual) -> list[Tensor]:
        """The stream, and the gradients of all inputs."""
        out = self.output(functions)
        grads = torch.autograd.grad(out, self.inputs(), self.dout.to(out.dtype))
        return [out.detach(), *grads]

    def wide(self) -> Case:
        """The same in fp64."""
        wide = Case.__new__(Case)
        wide.connection = self.kind(self.dims, device=DEVICE, dtype=torch.float64)
        wide.connection.load_state_dict(self.connection.state_dict())
        wide.norm = RMSNorm(self.norm.weight.numel(), self.norm.eps)
        wide.norm.weight = torch.nn.Parameter(self.norm.weight.detach().double())
        wide.stream = self.stream.detach().double().requires_grad_()
        wide.dout = self.dout
        return wide

    def plainly(self) -> list[Tensor]:
        """The formula as it is written, by autograd, in fp64."""
        wide = self.wide()
        stream = wide.stream.squeeze(2)
        inverse = torch.rsqrt(stream.square().mean(-1, keepdim=True) + self.dims.norm_eps)
        y = torch.tanh(stream * inverse * wide.norm.weight)
        if isinstance(wide.connection, PostGate):
            base, scale = wide.connection.base, wide.connection.scale
            moved = stream @ wide.connection.projection.weight[0]
            factor = 2 * torch.sigmoid(base + scale * moved.unsqueeze(-1) * inverse)
        else:
            factor = wide.connection.scale
        out = (stream + factor * y).unsqueeze(2)
        return [out.detach(), *torch.autograd.grad(out, wide.inputs(), wide.dout.double())]


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        ((f.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)).item()
        for f, e in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("residual_type", TYPES)
def test_the_functions_are_the_formula(residual_type):
    case = Case(residual_type)
    assert max(distances(case.wide().results(ONE_STREAM), case.plainly())) < 1e-13
    assert max(distances(case.results(ONE_STREAM), case.plainly())) < 3e-6


@interpreted
@pytest.mark.parametrize("residual_type", TYPES)
@pytest.mark.parametrize(
    "options",
    [{"scale": 3e4}, {"tokens": (1, 1), "width": 130, "scale": 1e-9}],
    ids=str,
)
def test_kernels_in_fp32_are_fp64_to_fp32s_last_bits(residual_type, options):
    case = Case(residual_type, **options)
    found = case.results(FUSED)
    assert max(distances(found, case.plainly())) < 3e-6
    assert all(result.isfinite().all() for result in found)


@pytest.mark.parametrize("residual_type", TYPES)
def test_kernels_in_bf16_have_the_references_own_errors(residual_type):
    tokens, width = ((2, 300), 1000) if on_gpu else ((1, 6), 72)
    case = Case(residual_type, tokens=tokens, width=width, dtype=torch.bfloat16)
    expected = case.plainly()
    found, reference = case.results(FUSED), case.results(ONE_STREAM)
    assert [f.dtype for f in found] == [r.dtype for r in reference]
    assert [f.shape for f in found] == [r.shape for r in reference]
    for error, allowed in zip(
        distances(found, expected), distances(reference, expected), strict=True
    ):
        assert error < 2.5 * allowed + 1e-5


@interpreted
@pytest.mark.parametrize("residual_type", TYPES)
def test_a_zero_row_gives_zeros_and_a_finite_gradient(residual_type):
    case = Case(residual_type)
    with torch.no_grad():
        case.stream[0, 1] = 0
    found, reference = case.results(FUSED), case.results(ONE_STREAM)
    assert all(result.isfinite().all() for result in found)
    assert found[0][0, 1].abs().max() == 0
    torch.testing.assert_close(found[1], reference[1], rtol=1e-4, atol=1e-5)


@interpreted
@pytest.mark.parametrize("residual_type", TYPES)
def test_kernels_under_checkpointing_give_the_same_bits(residual_type):
    case = Case(residual_type)
    expected = case.results(FUSED)
    out = checkpoint(case.output, FUSED, use_reentrant=False)
    for found, grad in zip(
        torch.autograd.grad(out, case.inputs(), case.dout), expected[1:], strict=True
    ):
        assert torch.equal(found, grad)


@interpreted
@pytest.mark.parametrize("residual_type", TYPES)
def test_without_tokens_kernels_give_nothing(residual_type):
    case = Case(residual_type, tokens=(1, 0))
    out, dstream, *others = case.results(FUSED)
    assert out.numel() == dstream.numel() == 0
    assert not any(grad.any() for grad in others)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("residual_type", TYPES)
def test_a_unit_with_kernels_has_the_references_stream_and_keeps_the_planned_bytes(
    residual_type, dtype
):
    dims = changed(preset("tiny"), residual_type=residual_type)
    before, spec = unit_specs(dims)[1:3]
    assert spec.kind == "moe"
    unit = build_unit(dims, spec, dtype=getattr(torch, dtype))
    init_parameters(unit, spec.name, seed=0)
    ids = torch.arange(3).view(1, 3)
    assert before.live_after == ("streams",)
    stream = torch.randn(1, 3, 1, dims.hidden_size, dtype=getattr(torch, dtype))
    carry = Carry(streams=stream.requires_grad_())
    batch = MicroBatch(ids, ids, ids)
    expected = unit(carry, batch)
    unit.residual = FUSED
    measured = measured_activations.measure([unit], carry, batch)
    assert measured.own_bytes == saved_bytes(dims, spec, 1, 3, dtype, mhc="triton")
    torch.testing.assert_close(unit(carry, batch).streams, expected.streams)


@pytest.mark.parametrize("residual_type", TYPES)
def test_what_kernels_do_not_take_is_refused(residual_type):
    case = Case(residual_type)
    case.norm.double()
    with pytest.raises(ValueError, match=rf"{residual_type} residual: .* gain torch\.float64"):
        case.output(FUSED)
    case = Case(residual_type)
    case.connection.bfloat16()
    with pytest.raises(ValueError, match=r"its parameters have to be float32, got torch\.bfloat16"):
        case.output(FUSED)
    case = Case(residual_type)
    case.stream = case.stream.detach()[..., :-1]
    with pytest.raises(ValueError, match=r"the stream is \[2, 3, 1, 39\]; .* \[B, T, 1, 40\]"):
        case.output(FUSED)
    case = Case(residual_type)
    x, handle, factor = FUSED.read(case.connection, case.norm, case.stream, None)
    with pytest.raises(ValueError, match=r"takes y \[2, 3, 40\] .* got \[2, 2, 40\]"):
        FUSED.write(handle, x[:, 1:], factor)
    with pytest.raises(ValueError, match=r"y is torch\.float64"):
        FUSED.write(handle, x.double(), factor)


@interpreted
@pytest.mark.parametrize("residual_type", TYPES)
def test_torch_accepts_the_ops(residual_type):
    case, checks = Case(residual_type), ("test_schema", "test_faketensor")
    stream, gain = case.stream.detach().flatten(0, 2), case.norm.weight.detach()
    of_gate = (None, None, None)
    if residual_type == "gated":
        own = case.connection
        of_gate = tuple(t.detach() for t in (own.projection.weight, own.base, own.scale))
    torch.library.opcheck(kernels._read, (stream, gain, *of_gate, 1e-6), test_utils=checks)
    x, inverse, projected, gate = kernels._read(stream, gain, *of_gate, 1e-6)
    is_gated = of_gate[0] is not None
    factor = gate if is_gated else torch.rand(stream.shape[1])
    torch.library.opcheck(kernels._write, (stream, x, factor, is_gated), test_utils=checks)
    torch.library.opcheck(kernels._write_backward, (x, x, factor, is_gated), test_utils=checks)
    to_gate = (projected, gate) if is_gated else (None, None)
    arguments = (x, stream, stream, gain, inverse, *of_gate, *to_gate)
    torch.library.opcheck(kernels._read_backward, arguments, test_utils=checks)


@interpreted
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at what warns
@pytest.mark.parametrize("residual_type", TYPES)
def test_compiled_kernels_give_the_same_bits(residual_type):
    case = Case(residual_type)
    expected = case.results(FUSED)
    torch._dynamo.reset()
    out = torch.compile(case.output, backend="aot_eager", dynamic=False)(FUSED)
    grads = torch.autograd.grad(out, case.inputs(), case.dout)
    torch._dynamo.reset()
    assert all(map(torch.equal, (out, *grads), expected))


@pytest.mark.parametrize("residual_type", TYPES)
def test_a_name_gives_the_functions_that_can_run_there(residual_type, monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert residual("auto", cpu, residual_type) is ONE_STREAM
    assert residual("triton", cuda, residual_type) == FUSED
    monkeypatch.setattr("ppruntime.models.residual.unavailable_reason", lambda _: "no device")
    assert residual("auto", cuda, residual_type) is ONE_STREAM


@pytest.mark.parametrize("family", ["v41-flash", "v4-flash"])
@pytest.mark.parametrize("residual_type", TYPES)
def test_a_boundary_is_one_stream(family, residual_type):
    dims = changed(preset(family), residual_type=residual_type)
    assert validate(dims) == []
    after = unit_specs(dims)[2]
    assert boundary_bytes(dims, after, 1, 8192) == 8192 * dims.hidden_size * 2
    with_mhc = boundary_bytes(preset(family), unit_specs(preset(family))[2], 1, 8192)
    assert with_mhc >= 4 * boundary_bytes(dims, after, 1, 8192)


def test_more_streams_than_one_are_refused():
    dims = changed(preset("tiny"), residual_type="gated", num_streams=4)
    assert validate(dims) == ["num_streams is 4; residual_type gated has 1"]


@pytest.mark.long
@pytest.mark.parametrize(("residual_type", "name"), [("gated", "tiny"), ("layerscale", "tiny-v4")])
def test_put_off_weight_gradients_and_recomputation_have_the_same_bits(residual_type, name):
    dims = changed(preset(name), residual_type=residual_type)
    batch = random_batch(dims, 2, [(9, 8)])

    def gradients(queue=None, recompute=False):
        units = build_units(dims, 2, torch.float32)
        for unit in units:
            set_queue(unit, queue)
        carry = Carry()
        for unit in units:
            arguments = (unit, carry, batch)
            carry = checkpoint(*arguments, use_reentrant=False) if recompute else unit(carry, batch)
        (carry.loss + carry.balance_loss).backward()
        for task in queue.pop() if queue else ():
            task()
        return named_grads(units)

    expected = gradients()
    assert any(f"{residual_type}." in key for key in expected)
    queue = WeightGradQueue()
    queue.deferring = True
    for other in (gradients(queue), gradients(recompute=True)):
        assert other.keys() == expected.keys()
        assert all(torch.equal(other[key], expected[key]) for key in expected)


@pytest.mark.long
@pytest.mark.parametrize("residual_type", TYPES)
def test_a_fresh_model_starts_near_mhcs_first_loss(residual_type):
    batch = random_batch(preset("tiny"), 0, [(33,)])
    losses = [
        run(build_units(changed(preset("tiny"), residual_type=kind), 0), batch).loss.item()
        for kind in (residual_type, "mhc")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != losses[1]


@pytest.mark.gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("residual_type", TYPES)
@pytest.mark.parametrize("width", [5120, 4096])
@pytest.mark.parametrize("tokens", [(1, 4096), (3, 1001), (1, 1)])
def test_kernels_at_full_width_on_a_gpu(residual_type, width, tokens):
    case = Case(residual_type, tokens=tokens, width=width, dtype=torch.bfloat16)
    expected = case.plainly()
    found, reference = case.results(FUSED), case.results(ONE_STREAM)
    for error, allowed in zip(
        distances(found, expected), distances(reference, expected), strict=True
    ):
        assert error < 2.5 * allowed + 1e-5
    again = case.results(FUSED)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
