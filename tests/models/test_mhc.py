import torch

from ppruntime.models.dims import preset
from ppruntime.models.init import init_parameters
from ppruntime.models.mhc import Coefficients, HyperConnection, collapse, sinkhorn, write_back


def plain_sinkhorn(logits, num_iters, eps):
    matrix = logits.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(num_iters - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def test_sinkhorn_is_doubly_stochastic():
    matrix = sinkhorn(torch.randn(7, 4, 4), 20, 1e-6)
    assert (matrix.sum(-2) - 1).abs().max() < 1e-5
    assert (matrix.sum(-1) - 1).abs().max() < 1e-3


def test_sinkhorn_equals_its_definition_and_so_does_its_gradient():
    for num_iters in (1, 2, 20):
        logits = torch.randn(5, 4, 4, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(5, 4, 4, dtype=torch.float64)
        ours, plain = sinkhorn(logits, num_iters, 1e-6), plain_sinkhorn(logits, num_iters, 1e-6)
        assert torch.equal(ours, plain)
        (ours_grad,) = torch.autograd.grad((ours * weights).sum(), logits)
        (plain_grad,) = torch.autograd.grad((plain * weights).sum(), logits)
        torch.testing.assert_close(ours_grad, plain_grad, rtol=1e-11, atol=1e-13)


def test_collapse_and_write_back_follow_their_sums():
    streams, y = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5)
    pre, post, comb = torch.rand(2, 3, 4), torch.rand(2, 3, 4), torch.rand(2, 3, 4, 4)
    read = sum(pre[..., i, None] * streams[..., i, :] for i in range(4))
    torch.testing.assert_close(collapse(streams, pre), read)
    written = torch.stack(
        [
            post[..., j, None] * y
            + sum(comb[..., i, j, None] * streams[..., i, :] for i in range(4))
            for j in range(4)
        ],
        dim=-2,
    )
    torch.testing.assert_close(write_back(streams, y, Coefficients(pre, post, comb)), written)


def test_coefficients_have_their_ranges_and_stay_fp32_in_a_bf16_model():
    dims = preset("tiny")
    connection = HyperConnection(dims, dtype=torch.bfloat16)
    init_parameters(connection, "mhc", 0)
    assert {p.dtype for p in connection.parameters()} == {torch.float32}
    pre, post, comb = connection(30 * torch.randn(2, 3, 4, 64).bfloat16())
    assert {t.dtype for t in (pre, post, comb)} == {torch.float32}
    assert ((pre > 0) & (pre < 1 + 2e-6)).all()
    assert ((post > 0) & (post < 2)).all()
    assert (comb > 0).all()


def test_coefficients_do_not_depend_on_the_streams_scale():
    connection = HyperConnection(preset("tiny"))
    init_parameters(connection, "mhc", 0)
    streams = torch.randn(1, 3, 4, 64)
    for ours, scaled in zip(connection(streams), connection(8 * streams), strict=True):
        torch.testing.assert_close(ours, scaled)
