"""Where weight gradients go: of fp32 weights to autograd, of bf16 ones into fp32 sums."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ppruntime.models.experts import ExpertLinear
from ppruntime.models.kernels.grouped_output import grouped_output
from ppruntime.models.kernels.rope import project_rotated
from ppruntime.models.linear import GroupedLinear, Linear, WeightGradQueue, set_queue
from ppruntime.models.rope import Rotation

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
gpu = pytest.mark.gpu
TOKENS, WIDTH, GROUPS = 48, 64, 2
LOW = torch.bfloat16


class Case:
    """One kind of linear: `run(x)` gives its result."""

    def __init__(self, kind: str, dtype: torch.dtype = LOW) -> None:
        options = {"device": DEVICE, "dtype": dtype}
        self.kind, self.shape = kind, (1, TOKENS, WIDTH)
        if kind in ("grouped", "grouped without copies"):
            self.layer = GroupedLinear(GROUPS, WIDTH, 32, **options)
            self.shape = (1, TOKENS, GROUPS, WIDTH)
            self.run = self.layer if kind == "grouped" else partial(grouped_output, self.layer)
        elif kind == "experts":
            self.layer = ExpertLinear(3, WIDTH, 32, **options)
            self.shape = (TOKENS, WIDTH)
            self.run = lambda x: self.layer(x, [20, 0, TOKENS - 20])
        else:
            self.layer = Linear(WIDTH, 64, fp32_output=kind == "fp32 result", **options)
            self.run = self.layer
        if kind == "rotated":
            sines = torch.ones(1, TOKENS, 8, device=DEVICE)
            rotation = Rotation(0 * sines, sines)  # by a quarter, which rounds nothing
            self.run = lambda x: project_rotated(self.layer, x, rotation, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, generator=generator))
        self.batches = [torch.randn(self.shape, generator=generator).to(DEVICE) for _ in range(5)]

    @property
    def weight(self) -> torch.nn.Parameter:
        return self.layer.weight

    def backward(self, batch: Tensor, *, recomputed: bool = False) -> None:
        """Of a sum of squares, whose gradient is as uneven as its results."""
        x = batch.to(self.weight.dtype).requires_grad_()
        y = checkpoint(self.run, x, use_reentrant=False) if recomputed else self.run(x)
        y.backward(y.detach())

    def summed(self, **options: bool) -> Tensor:
        """The weight's gradient over all micro-batches."""
        self.weight.grad = None
        for batch in self.batches:
            self.backward(batch, **options)
        assert self.weight.grad is not None
        return self.weight.grad

    def products(self) -> list[Tensor]:
        """Each micro-batch's gradient in fp64, of the numbers that the layer reads and gets."""
        wide, found = Case.__new__(Case), []
        wide.__dict__ |= Case(self.kind, torch.float32).__dict__
        with torch.no_grad():
            wide.weight.copy_(self.weight)
        for batch in self.batches:
            x = batch.to(LOW)
            with torch.no_grad():
                grad = self.run(x).to(LOW).float()
            wide.weight.grad = None
            wide.run(x.float()).backward(grad)
            found.append(wide.weight.grad.double())
        return found


PRODUCTS = ["plain", "fp32 result", "rotated", "grouped", "grouped without copies"]
KINDS = [*PRODUCTS, "experts"]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_bf16_weights_are_summed_in_fp32(kind):
    case = Case(kind)
    products = case.products()
    exact = torch.stack(products).sum(0)
    in_bf16 = torch.stack([product.to(LOW) for product in products]).double().sum(0)

    def error(found: Tensor) -> float:
        return ((found.double() - exact).norm() / exact.norm()).item()

    found = case.summed()
    assert found.dtype is torch.float32
    # Experts' products are rounded before they are added, as `in_bf16`; no sum of them is.
    assert error(found) < (1e-6 if kind in PRODUCTS else 1.01 * error(in_bf16))
    assert error(in_bf16) > 5e-4


@pytest.mark.parametrize("kind", KINDS)
def test_put_off_or_recomputed_gradients_of_bf16_weights_have_the_same_bits(kind):
    case = Case(kind)
    expected = case.summed()
    assert torch.equal(case.summed(recomputed=True), expected)
    queue = WeightGradQueue()
    set_queue(case.layer, queue)
    for recomputed in (False, True):
        case.weight.grad = None
        queue.deferring = True
        for batch in case.batches:
            case.backward(batch, recomputed=recomputed)
        queue.deferring = False
        assert case.weight.grad is None
        tasks = queue.pop()
        assert len(tasks) == len(case.batches)
        for task in tasks:
            task()
        assert torch.equal(case.weight.grad, expected)


def test_gradients_of_fp32_weights_are_autograds_to_the_bit():
    case = Case("plain", torch.float32)
    plain = case.weight.detach().clone().requires_grad_()
    for batch in case.batches:
        y = functional.linear(batch, plain)
        y.backward(y.detach())
    assert torch.equal(case.summed(), plain.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_bf16_weight_gets_no_gradient(kind):
    case = Case(kind)
    case.weight.requires_grad_(False)
    case.backward(case.batches[0])
    assert case.weight.grad is None


@pytest.mark.parametrize("autograd_first", [True, False])
def test_what_autograd_adds_to_a_bf16_weight_goes_into_the_same_fp32_sum(autograd_first):
    case = Case("plain")
    uses = [lambda: case.weight.sum().backward(), lambda: case.backward(case.batches[0])]
    for use in uses if autograd_first else reversed(uses):
        use()
    expected = Case("plain")
    expected.backward(case.batches[0])
    assert case.weight.grad.dtype is torch.float32
    assert torch.equal(case.weight.grad, expected.weight.grad + 1)


def test_a_bf16_weight_that_is_computed_passes_its_gradient_on():
    case = Case("plain")
    parameter = case.weight.detach().float().requires_grad_()
    del case.layer.weight
    case.layer.weight = parameter.to(LOW)
    case.backward(case.batches[0])
    expected = Case("plain")
    expected.backward(case.batches[0])
    assert torch.equal(parameter.grad, expected.weight.grad.to(LOW).float())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("dtype", [torch.float32, LOW])
def test_a_compiled_linear_gives_its_gradient_to_autograd(dtype):
    case = Case("plain", dtype)
    expected = case.summed()
    case.layer = Case("plain", dtype).layer
    case.run = torch.compile(case.layer, backend="aot_eager", fullgraph=True)
    found = case.summed()
    assert found.dtype is dtype
    assert (found - expected).norm() < 5e-3 * expected.norm()


class Ops(TorchDispatchMode):
    """Notes the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", PRODUCTS)
def test_nothing_is_added_but_by_the_products_of_a_bf16_linear(kind):
    case = Case(kind)
    case.backward(case.batches[0])
    with Ops() as ops:
        for batch in case.batches[1:]:
            case.backward(batch)
    assert not {"add", "add_"} & set(ops.names)
    num_products = GROUPS if case.kind.startswith("grouped") else 1
    assert sum("addmm" in name for name in ops.names) == num_products * len(case.batches[1:])


@gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("kind", PRODUCTS)
def test_no_kernel_of_a_bf16_linears_weight_gradient_adds_or_casts(kind):
    case = Case(kind)
    case.backward(case.batches[0])
    results = [case.run(batch.to(LOW)) for batch in case.batches]
    grads = [torch.ones_like(y) for y in results]
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for y, grad in zip(results, grads, strict=True):
            y.backward(grad)
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [event.name for event in profile.events() if event.device_type == cuda]
    assert kernels
    casts = [name for name in kernels if "elementwise" in name]
    # A gradient that comes in fp32 is rounded for the products, once per micro-batch.
    assert len(casts) == (len(results) if kind == "fp32 result" else 0), casts
