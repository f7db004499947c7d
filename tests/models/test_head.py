"""The head's loss in chunks, by torch and by the kernels, against all logits at once and fp64."""

from __future__ import annotations

import measured_activations
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ppruntime.models.activation_bytes import saved_bytes
from ppruntime.models.carry import IGNORED_LABEL, Carry, MicroBatch
from ppruntime.models.dims import preset, unit_specs
from ppruntime.models.head import chunked_loss, head_loss, whole_loss
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels.head import _softmax_grad, _softmax_grad_kernel, fused_loss
from ppruntime.models.linear import Linear, WeightGradQueue, set_queue
from ppruntime.models.units import build_unit

on_gpu = torch.cuda.is_available()
DEVICE = "cuda" if on_gpu else "cpu"
CHUNKED = [chunked_loss, fused_loss]
LOW = torch.bfloat16
gpu = pytest.mark.gpu
SEED = 0.375  # of the loss, and no power of two


class Case:
    """Hidden states, a projection and labels, some ignored."""

    def __init__(self, tokens=(2, 7), width=24, vocab=300, dtype=torch.float32, scale=1.0):
        generator = torch.Generator().manual_seed(0)
        self.projection = Linear(width, vocab, dtype=dtype, device=DEVICE, fp32_output=True)
        with torch.no_grad():
            weight = scale * torch.randn(vocab, width, generator=generator)
            self.projection.weight.copy_(weight)
        hidden = torch.randn(*tokens, width, generator=generator).to(DEVICE, dtype)
        self.hidden = hidden.requires_grad_()
        self.labels = torch.randint(vocab, tokens, generator=generator).to(DEVICE)
        self.labels[0, -2:] = IGNORED_LABEL
        self.labels[-1, 0] = IGNORED_LABEL

    def results(self, loss_of, **options) -> list[Tensor]:
        """Loss, gradient of the hidden states, gradient of the weight."""
        loss = loss_of(self.hidden, self.projection, self.labels, **options)
        return [loss.detach(), *gradients(loss, self.hidden, self.projection.weight)]

    def expected(self) -> list[Tensor]:
        """The same numbers through `whole_loss` in fp64."""
        wide = Case.__new__(Case)
        wide.projection = Linear(1, 1)
        wide.projection.weight = torch.nn.Parameter(self.projection.weight.detach().double())
        wide.hidden = self.hidden.detach().double().requires_grad_()
        wide.labels = self.labels
        loss = whole_loss(wide.hidden, wide.projection, wide.labels)
        grads = torch.autograd.grad(loss, (wide.hidden, wide.projection.weight))
        return [loss.detach(), *(SEED * grad for grad in grads)]


def gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    """Taken from where a backward puts them: a weight in bf16 gets its own past autograd."""
    loss.backward(torch.tensor(SEED, device=DEVICE))
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def distances(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [
        ((f.double() - e.double()).norm() / e.double().norm().clamp_min(1e-30)).item()
        for f, e in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("loss_of", CHUNKED)
@pytest.mark.parametrize(("scale", "chunk"), [(0.1, 4), (1.0, 1), (30.0, 100)])
def test_a_loss_in_chunks_is_fp64s_loss_to_fp32s_last_bits(loss_of, scale, chunk):
    if on_gpu and loss_of is fused_loss:
        pytest.skip("on a GPU the kernels take bf16")
    case = Case(scale=scale)
    found = case.results(loss_of, chunk_tokens=chunk)
    # A softmax of logits in the hundreds: their last bit is 3e-5.
    assert max(distances(found, case.expected())) < 2e-6 * max(scale, 1)


@pytest.mark.parametrize("loss_of", CHUNKED)
@pytest.mark.parametrize("scale", [0.3, 20.0])
def test_in_bf16_the_error_is_one_rounding_of_the_gradients(loss_of, scale):
    case = Case(dtype=LOW, scale=scale)
    found, expected = case.results(loss_of, chunk_tokens=4), case.expected()
    loss_error, *grad_errors = distances(found, expected)
    assert loss_error < 2e-6
    # Gradients of logits are rounded (2^-9 each), and so are sums over them.
    assert max(grad_errors) < 5e-3
    assert [g.dtype for g in found] == [torch.float32, LOW, torch.float32]
    reference = distances(case.results(whole_loss), expected)
    assert max(grad_errors) < 1.5 * max(reference[1:])


@pytest.mark.parametrize("loss_of", CHUNKED)
def test_a_vocabulary_of_several_blocks_is_summed_whole(loss_of, monkeypatch):
    monkeypatch.setattr("ppruntime.models.kernels.head._PART", 64)
    monkeypatch.setattr("ppruntime.models.kernels.head.VOCAB_BLOCK", 130)
    case = Case(dtype=LOW)
    expected = case.expected()
    assert max(distances(case.results(loss_of, chunk_tokens=3), expected)) < 5e-3


@pytest.mark.parametrize("loss_of", CHUNKED)
def test_ignored_labels_give_no_loss_and_no_gradient(loss_of):
    case = Case(dtype=LOW)
    _, grad_hidden, _ = case.results(loss_of, chunk_tokens=4)
    ignored = case.labels == IGNORED_LABEL
    assert not grad_hidden[ignored].any()
    assert grad_hidden[~ignored].any(-1).all()
    case.labels.fill_(IGNORED_LABEL)
    assert not any(result.any() for result in case.results(loss_of, chunk_tokens=4))


@pytest.mark.parametrize("loss_of", CHUNKED)
def test_without_tokens_there_is_no_loss(loss_of):
    case = Case(dtype=LOW)
    case.hidden, case.labels = case.hidden.detach()[:, :0].requires_grad_(), case.labels[:, :0]
    loss, grad_hidden, grad_weight = case.results(loss_of)
    assert loss == 0
    assert grad_hidden.shape == case.hidden.shape
    assert not grad_weight.any()


@pytest.mark.parametrize("loss_of", CHUNKED)
def test_a_weight_gradient_that_is_put_off_is_the_same_to_the_bit(loss_of):
    case = Case(dtype=LOW)
    loss, grad_hidden, _ = case.results(loss_of, chunk_tokens=4)
    queue, weight = WeightGradQueue(), case.projection.weight
    for _ in range(2):
        at_once = loss_of(case.hidden, case.projection, case.labels, chunk_tokens=4)
        at_once.backward(torch.tensor(SEED, device=DEVICE))
    expected = weight.grad
    case.hidden.grad = weight.grad = None
    set_queue(case.projection, queue)
    for _ in range(2):
        later = loss_of(case.hidden, case.projection, case.labels, chunk_tokens=4)
        queue.deferring = True
        later.backward(torch.tensor(SEED, device=DEVICE))
        queue.deferring = False
        assert torch.equal(later.detach(), loss)
    assert torch.equal(case.hidden.grad, 2 * grad_hidden)
    assert weight.grad is None
    tasks = queue.pop()
    assert len(tasks) == 2
    for task in tasks:
        task()
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("loss_of", CHUNKED)
def test_a_frozen_projection_or_input_gets_no_gradient(loss_of):
    case = Case(dtype=LOW)
    _, grad_hidden, grad_weight = case.results(loss_of, chunk_tokens=4)
    weight = case.projection.weight.requires_grad_(False)
    loss = loss_of(case.hidden, case.projection, case.labels, chunk_tokens=4)
    found, none = gradients(loss, case.hidden, weight)
    assert torch.equal(found, grad_hidden)
    assert none is None
    weight.requires_grad_(True)
    loss = loss_of(case.hidden.detach(), case.projection, case.labels, chunk_tokens=4)
    (found,) = gradients(loss, weight)
    assert torch.equal(found, grad_weight)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        wide = (t for t in tensors if isinstance(t, Tensor) and t.dtype is torch.float32)
        sizes = (t.numel() for t in wide)
        self.most = max(self.most, *sizes, 0)
        return result


@pytest.mark.parametrize("loss_of", CHUNKED)
def test_no_tensor_has_all_tokens_logits_in_fp32(loss_of):
    case = Case(tokens=(2, 32), vocab=300, dtype=LOW)
    # In the backward a CPU widens what a GPU multiplies as it is.
    with LargestTensor() as largest:
        loss_of(case.hidden, case.projection, case.labels, chunk_tokens=32)
    assert largest.most == 32 * 300
    with LargestTensor() as largest:
        whole_loss(case.hidden, case.projection, case.labels)
    assert largest.most == 64 * 300


def test_a_label_that_is_no_token_is_not_taken_for_one():
    case = Case(dtype=LOW)
    for wrong in (-5, 300):
        case.labels[0, 0] = wrong
        assert fused_loss(case.hidden, case.projection, case.labels).isnan()
        if not on_gpu:
            with pytest.raises(RuntimeError, match="out of bounds"):
                chunked_loss(case.hidden, case.projection, case.labels)


def test_other_dtypes_than_the_kernels_are_refused():
    case = Case(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"hidden states are torch\.float64"):
        fused_loss(case.hidden, case.projection, case.labels)
    assert max(distances(case.results(chunked_loss, chunk_tokens=4), case.expected())) < 1e-14


@pytest.mark.parametrize(("num_parts", "part_size"), [(4, 80), (8, 48), (2, 160)])
def test_programs_that_share_a_row_make_of_it_what_one_makes(num_parts, part_size):
    logits = 5 * torch.randn(3, 300, device=DEVICE)
    labels = torch.tensor([1, IGNORED_LABEL, 299], device=DEVICE)
    whole, shared = (torch.empty(3, 300, device=DEVICE, dtype=LOW) for _ in range(2))
    expected, loss = _softmax_grad(logits, labels, whole), torch.empty(3, device=DEVICE)
    sums = torch.zeros(3, num_parts, 2, device=DEVICE)
    # The interpreter runs one program after another: none may wait, and the second time all have
    # said their sums.
    for _ in range(1 if on_gpu else 2):
        counts = torch.full((4,), 0 if on_gpu else num_parts, dtype=torch.int32, device=DEVICE)
        counts[-1] = 0
        _softmax_grad_kernel[(3 * num_parts,)](
            logits, labels, loss, shared, sums, counts, 3, 300,
            IGNORED_LABEL, True, num_parts, part_size, 256, num_warps=8,
        )  # fmt: skip
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert torch.allclose(shared, whole, rtol=2**-7, atol=1e-30)


def test_the_registration_is_consistent():
    logits = torch.randn(3, 50, device=DEVICE)
    labels = torch.tensor([1, IGNORED_LABEL, 49], device=DEVICE)
    op = torch.ops.ppruntime.head_softmax_grad.default
    for width in (0, 50):
        grad = torch.empty(3, width, device=DEVICE, dtype=LOW)
        torch.library.opcheck(
            op, (logits, labels, grad), test_utils=("test_schema", "test_faketensor")
        )


def test_a_name_gives_the_loss_that_can_run_there(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert head_loss("reference", cpu) is whole_loss
    assert head_loss("chunked", cuda) is chunked_loss
    assert head_loss("auto", cpu) is chunked_loss
    assert head_loss("auto", cuda) is fused_loss
    assert head_loss("triton", cuda) is fused_loss
    monkeypatch.setattr("ppruntime.models.head.unavailable_reason", lambda _: "there is no device")
    assert head_loss("auto", cuda) is chunked_loss
    with pytest.raises(RuntimeError, match=r'kernels\.head = "triton": there is no device; "chunk'):
        head_loss("triton", cuda)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", ["chunked", "triton"])
@pytest.mark.parametrize("name", ["tiny", "tiny-v4"])
def test_the_plans_bytes_are_what_is_kept(name, kernel, dtype):
    dims = replace(preset(name), vocab_size=100)
    spec = unit_specs(dims)[-1]
    unit = build_unit(dims, spec, dtype=getattr(torch, dtype))
    init_parameters(unit, spec.name, seed=0)
    unit.loss_of = {"chunked": chunked_loss, "triton": fused_loss}[kernel]
    ids = torch.arange(6).view(2, 3)
    carry = measured_activations.blank_carry(dims, unit_specs(dims)[-2], 2, 3, dtype)
    fields = {
        name: torch.randn(field.shape).to(field.dtype).requires_grad_()
        for name, field in carry._asdict().items()
        if isinstance(field, Tensor)
    }
    measured = measured_activations.measure([unit], Carry(**fields), MicroBatch(ids, ids, ids))
    assert saved_bytes(dims, spec, 2, 3, dtype, head=kernel) == measured.own_bytes


@gpu
@pytest.mark.skipif(not on_gpu, reason="needs a GPU")
@pytest.mark.parametrize("tokens", [(1, 4096), (3, 1367)])
def test_at_full_width_on_a_gpu(tokens):
    case = Case(tokens=tokens, width=5120, vocab=129_280, dtype=LOW, scale=0.02)
    expected = case.results(whole_loss)
    for loss_of in CHUNKED:
        loss_error, *grad_errors = distances(case.results(loss_of), expected)
        assert loss_error < 1e-6
        assert max(grad_errors) < 5e-3
