import gc
import math
from types import SimpleNamespace

import pytest
import torch
from measured_activations import storage
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from whole_model import byte_token_map, random_batch

from ppruntime.models import engram_rows
from ppruntime.models.dims import preset
from ppruntime.models.engram import Engram, NgramHash, add_row_grads, hash_multipliers, look_up
from ppruntime.models.engram_hash import bucket_sizes, is_prime, normalized, token_map
from ppruntime.models.engram_rows import TOGETHER, TableRows, unique_rows
from ppruntime.models.init import init_parameters

TINY = preset("tiny")
FLASH = preset("v41-flash")


def test_multipliers_of_v41_flash_are_the_released_ones():
    assert hash_multipliers(1, 4, 99092) == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert hash_multipliers(14, 4, 99092) == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )


def test_table_sizes_of_v41_flash_are_the_released_ones():
    sizes = bucket_sizes(FLASH)
    assert sizes[0][:2] == (16000057, 16000079)
    assert [sum(layer) for layer in sizes] == [384006168, 384016682]


def test_small_tables_have_the_rows_of_the_reference_run():
    assert [sum(layer) for layer in bucket_sizes(TINY)] == [630, 834]
    assert [sum(layer) for layer in bucket_sizes(preset("v41-proxy-8"))] == [1574980, 1580602]


def test_primes_are_those_of_a_sieve():
    numbers = set(range(2, 2000))
    for n in range(2, 45):
        numbers -= set(range(2 * n, 2000, n))
    assert {n for n in range(2000) if is_prime(n)} == numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Ünï", "uni"),
        (" The\n\t ", "the"),
        ("a \r\n b", "a b"),
        (" ", " "),
        ("\n\n", " "),
        ("ﬁ", "fi"),
        ("́", "́"),
        ("\u00a0", " "),
    ],
)
def test_tokens_are_normalised(text, expected):
    assert normalized(text) == expected


def test_parts_of_characters_keep_their_symbols_apart():
    assert token_map(["a", "\ufffd", "A", "\ufffd"], ["a", "Ã", "A", "©"]) == (0, 1, 0, 2)


def test_the_256_bytes_have_227_classes():
    assert len(set(byte_token_map())) == 227


def plain_rows(dims, layer, ids, positions, masked, classes):
    """Rows of one sequence by the definition, in Python's integers."""
    multipliers = hash_multipliers(layer, 4, dims.engram_compressed_vocab)
    sizes = bucket_sizes(dims)[dims.engram_layers.index(layer)]
    rows = []
    for t in range(len(ids)):
        tokens, cut = [], False
        for back in range(4):
            cut = cut or back > positions[t] or masked[t - back]
            tokens.append(classes[dims.engram_pad_id if cut else ids[t - back]])
        row, column = [], 0
        for order in (2, 3, 4):
            mixed = 0
            for token, multiplier in zip(tokens[:order], multipliers, strict=False):
                mixed ^= token * multiplier
            for _ in range(dims.engram_heads):
                row.append(mixed % sizes[column] + sum(sizes[:column]))
                column += 1
        rows.append(row)
    return rows


@pytest.mark.parametrize("compressed_vocab", [256, 227])
def test_rows_follow_the_hash_within_documents_and_up_to_masked_tokens(compressed_vocab):
    dims = replace(TINY, engram_compressed_vocab=compressed_vocab)
    ngrams = NgramHash(dims, 4)
    classes = range(256)
    if compressed_vocab != 256:
        classes = byte_token_map()
        ngrams.token_map.copy_(torch.tensor(classes))
    batch = random_batch(dims, 5, [(1, 9, 2, 20), (16, 3, 12, 1)])
    masked = torch.rand(2, 32, generator=torch.Generator().manual_seed(0)) < 0.2
    rows = ngrams(batch.ids, batch.positions, masked)
    for b in range(2):
        expected = plain_rows(
            dims,
            4,
            batch.ids[b].tolist(),
            batch.positions[b].tolist(),
            masked[b].tolist(),
            classes,
        )
        assert rows[b].tolist() == expected


def test_constants_come_back_after_the_meta_device():
    dims = replace(TINY, engram_compressed_vocab=200)
    ngrams = NgramHash(dims, 1, device="meta").to_empty(device="cpu")
    ngrams.reset_buffers()
    fresh = NgramHash(dims, 1)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(ngrams.get_buffer(name), buffer), name


def make_engram(dtype=torch.float32):
    engram = Engram(TINY, 1, dtype=dtype)
    init_parameters(engram, "engram", 0, std=0.3)
    return engram


def test_gate_and_sum_follow_their_formula():
    engram, batch = make_engram(), random_batch(TINY, 0, [(6,)])
    with torch.no_grad():
        engram.query.normal_()
        engram.key.normal_()
    streams = torch.randn(1, 6, 4, 64)
    out = engram(streams, batch.ids, batch.positions)
    rows = engram.hash(batch.ids, batch.positions)
    for t in range(6):
        found = engram.projection.weight @ engram.table[rows[0, t]].flatten()
        value = found[4 * 64 :]
        for i in range(4):
            x, key = streams[0, t, i], found[i * 64 : (i + 1) * 64]
            match = (x * engram.query[i] * engram.key[i] * key).sum() / math.sqrt(64)
            match = match / x.square().mean().sqrt() / key.square().mean().sqrt()
            root = match.abs().clamp_min(1e-6).sqrt() * match.sign()
            torch.testing.assert_close(out[0, t, i], x + torch.sigmoid(root) * value)


def test_masked_tokens_keep_their_streams():
    engram, batch = make_engram(), random_batch(TINY, 0, [(6,)])
    streams = torch.randn(1, 6, 4, 64)
    masked = torch.tensor([[False, True, False, False, False, True]])
    out = engram(streams, batch.ids, batch.positions, masked)
    assert torch.equal(out[masked], streams[masked])
    assert not torch.equal(out[~masked], streams[~masked])


class MostElements(TorchDispatchMode):
    """Notes the largest tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and storage(tensor) not in given:
                self.most = max(self.most, tensor.numel())
        return result


def test_row_gradients_are_the_dense_ones_to_the_bit_and_need_no_second_table():
    generator = torch.Generator().manual_seed(0)
    table = torch.nn.Parameter(torch.randn(5000, 8, generator=generator))
    dense = table.detach().clone().requires_grad_()
    for _ in range(2):  # the second time on top of the first
        rows = torch.randint(7, (40,), generator=generator) * 700
        grad = torch.randn(40, 8, generator=generator)
        torch.nn.functional.embedding(rows, dense).backward(grad)
        with MostElements() as seen:
            add_row_grads(table, rows, grad)
        assert torch.equal(table.grad, dense.grad)
    assert seen.most == 40 * 8
    add_row_grads(table, rows[:0], grad[:0])
    assert torch.equal(table.grad, dense.grad)


def test_row_gradients_in_bf16_are_rounded_once_a_call():
    table = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    grad = torch.full((300, 2), 2**-8, dtype=torch.bfloat16)
    grad[0] = 1
    add_row_grads(table, torch.ones(300, dtype=torch.int64), grad)
    assert table.grad.tolist() == [[0, 0], [1 + 300 / 256] * 2, [0, 0]]


def test_a_device_named_with_and_without_its_number_is_one_device():
    """Else a table on the GPU is opened as host memory, which CUDA refuses."""
    table = torch.nn.Parameter(torch.randn(9, 4))
    assert table.device != torch.device("cpu", 0)
    source = TableRows(
        table.detach(), num_rows=9, dtype=torch.float32, device=torch.device("cpu", 0)
    )
    rows = torch.tensor([1, 3, 3])
    source.announce([rows])
    source.turn = 0
    look_up(rows, table, torch.float32, source).sum().backward()
    sums = source.flush()
    assert sums.sum(1).tolist() == [0, 4, 0, 8, 0, 0, 0, 0, 0]


def test_rows_sorted_together_are_those_of_each_micro_batch_alone():
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 7, 2**31 + 5):
        rows = [
            torch.randint(num_rows, shape, generator=generator)
            for shape in ((2, 5, 3), (1,), (0,), (40, 1))
        ]
        dtype = torch.int32 if num_rows < 2**31 else torch.int64
        for found, alone in zip(unique_rows(rows, num_rows, dtype), rows, strict=True):
            assert found.dtype is dtype
            assert torch.equal(found, torch.unique(alone).to(dtype))


def test_announced_micro_batches_have_the_rows_that_their_forwards_read():
    """More of them than are hashed at once, with masked tokens."""
    engram, count = make_engram(), TOGETHER + 1
    batches = [random_batch(TINY, seed, [(6,), (4, 2)]) for seed in range(count)]
    batches = [b._replace(masked=torch.rand(b.ids.shape) < 0.3) for b in batches]
    found = []
    engram.source = SimpleNamespace(announce=found.extend)
    engram.announce(batches)
    assert len(found) == count
    for rows, b in zip(found, batches, strict=True):
        assert torch.equal(rows, engram.hash(b.ids, b.positions, b.masked))


def test_host_memory_that_cuda_refuses_is_a_sentence_and_leaves_no_error_behind(monkeypatch):
    asked, taken_up = [], []

    class Cudart:
        def cudaHostRegister(self, *request):
            asked.append(request)
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(engram_rows, "_take_up_error", lambda: taken_up.append(True))
    empty = torch.empty(0, 4)
    assert engram_rows.open_to_device(empty) is empty
    assert not asked
    table = torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match=r"cannot open 48 bytes .* \(CUDA error 2\)"):
        engram_rows.open_to_device(table)
    assert asked == [(table.data_ptr(), 48, 0)]
    assert taken_up


def test_host_memory_is_closed_to_cuda_again_before_others_can_get_it(monkeypatch):
    opened, closed = [], []

    class Cudart:
        def cudaHostRegister(self, address, num_bytes, flags):
            opened.append((address, num_bytes, flags))
            return 0

        def cudaHostUnregister(self, address):
            closed.append(address)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    parameter = torch.nn.Parameter(engram_rows.open_to_device(torch.zeros(3, 4)))
    address = parameter.data_ptr()
    assert opened == [(address, 48, 0)]
    view = parameter.detach()[1:]
    del parameter
    gc.collect()
    assert not closed  # a view of it still is there
    del view
    gc.collect()
    assert closed == [address]


def test_an_engrams_table_gets_its_gradient_through_the_rows():
    engram, batch = make_engram(), random_batch(TINY, 0, [(6,)])
    streams = torch.randn(1, 6, 4, 64)
    engram(streams, batch.ids, batch.positions).sum().backward()
    rows = engram.hash(batch.ids, batch.positions)
    touched = torch.zeros(len(engram.table), dtype=torch.bool)
    touched[rows.flatten()] = True
    assert engram.table.grad[touched].any(-1).all()
    assert not engram.table.grad[~touched].any()
