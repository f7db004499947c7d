import torch

from ppruntime.models import kernel_limits
from ppruntime.models.attention import Compressor
from ppruntime.models.dims import preset
from ppruntime.models.documents import group_places
from ppruntime.models.init import init_parameters
from ppruntime.models.sparse_attention import sparse_attention

TINY = preset("tiny")


def problem(dtype=torch.float64, num_keys=11):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 3, 8, generator=generator, dtype=dtype)
    keys = torch.randn(2, num_keys, 8, generator=generator, dtype=dtype)
    sink = torch.randn(3, generator=generator, dtype=dtype)
    order = torch.rand(2, 5, num_keys, generator=generator).argsort(-1)[..., :6]
    slots = order.masked_fill(torch.rand(2, 5, 6, generator=generator) < 0.3, -1).int()
    slots[0, 0] = -1
    return q.requires_grad_(), keys.requires_grad_(), slots, sink.requires_grad_()


def dense_attention(q, keys, slots, sink):
    """Softmax over all keys with a mask, and an extra zero key whose score is the sink."""
    visible = torch.zeros(*slots.shape[:2], keys.shape[1] + 1, dtype=torch.bool)
    visible.scatter_(-1, torch.where(slots >= 0, slots, keys.shape[1]).long(), True)
    scores = torch.einsum("bthk,bnk->bthn", q, keys) / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~visible[..., None, :-1], -torch.inf)
    with_sink = torch.cat((scores, sink.view(1, 1, -1, 1).expand(*scores.shape[:3], 1)), -1)
    values = torch.cat((keys, torch.zeros_like(keys[:, :1])), dim=1)
    return torch.einsum("bthn,bnk->bthk", with_sink.softmax(-1), values)


def test_sparse_attention_equals_dense_masked_attention_and_so_do_its_gradients():
    q, keys, slots, sink = problem()
    ours, dense = sparse_attention(q, keys, slots, sink), dense_attention(q, keys, slots, sink)
    torch.testing.assert_close(ours, dense)
    weights = torch.randn_like(dense)
    ours_grads = torch.autograd.grad((ours * weights).sum(), (q, keys, sink))
    dense_grads = torch.autograd.grad((dense * weights).sum(), (q, keys, sink))
    for grad, expected in zip(ours_grads, dense_grads, strict=True):
        torch.testing.assert_close(grad, expected)


def test_a_query_that_sees_nothing_gives_zeros():
    q, keys, slots, sink = problem()
    assert (sparse_attention(q, keys, slots, sink)[0, 0] == 0).all()


def test_places_in_the_slot_list_do_not_matter():
    q, keys, slots, sink = problem()
    ours, turned = (sparse_attention(q, keys, s, sink) for s in (slots, slots.flip(-1)))
    torch.testing.assert_close(ours, turned)


def test_sparse_attention_passes_the_gradient_check():
    q, keys, slots, sink = problem()
    assert torch.autograd.gradcheck(
        lambda q, keys, sink: sparse_attention(q, keys, slots, sink), (q, keys, sink)
    )


def test_blocks_of_queries_give_the_same_values(monkeypatch):
    q, keys, slots, sink = problem()
    whole = sparse_attention(q, keys, slots, sink)
    monkeypatch.setattr(kernel_limits, "_MAX_GATHERED", 2 * 6 * 8 * 2)
    parts = sparse_attention(q, keys, slots, sink)
    assert torch.equal(whole, parts)
    weights = torch.randn_like(whole)
    whole_grads = torch.autograd.grad((whole * weights).sum(), (q, keys, sink))
    part_grads = torch.autograd.grad((parts * weights).sum(), (q, keys, sink))
    for grad, expected in zip(part_grads, whole_grads, strict=True):
        torch.testing.assert_close(grad, expected)


def test_compressor_averages_each_channel_over_a_group():
    compressor = Compressor(TINY, 2, dtype=torch.float64)
    init_parameters(compressor, "compressor", 0, std=0.5)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    x = torch.randn(1, 7, 64, dtype=torch.float64)
    latent = compressor(x, group_places(positions, 2))
    for entry, (first, second) in enumerate([(0, 1), (3, 4), (5, 6)]):
        pair = x[0, [first, second]]
        shares = (pair @ compressor.gate.weight.T).softmax(0)
        pooled = (shares * (pair @ compressor.value.weight.T)).sum(0)
        expected = pooled / (pooled.square().mean() + 1e-20).sqrt() * compressor.norm.weight
        torch.testing.assert_close(latent[0, entry], expected)


def test_pooling_weights_stay_fp32_in_a_bf16_model():
    pooling, projecting = (Compressor(TINY, ratio, dtype=torch.bfloat16) for ratio in (2, 1))
    assert pooling.value.weight.dtype is pooling.gate.weight.dtype is torch.float32
    assert pooling.norm.weight.dtype is projecting.value.weight.dtype is torch.bfloat16
