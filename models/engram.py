"""Engram: rows looked up by hashes of the last tokens, gated into the residual streams.

Shape letters: B sequences, T tokens, G tokens of the longest n-gram, H columns = table rows per
token (orders 2 to G, each with `engram_heads` hash functions), S streams, D model width.
Source: DeepSeek-V4.1 report, section 2.4.2; the hash constants reproduce the released tables.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.dims import ModelDims
from ppruntime.models.engram_hash import bucket_sizes
from ppruntime.models.keep_inputs import named_op
from ppruntime.models.linear import Linear
from ppruntime.models.norm import inverse_rms
from ppruntime.models.precision import widened


def hash_multipliers(layer: int, max_order: int, compressed_vocab: int) -> tuple[int, ...]:
    """One odd factor per place of the n-gram, so small that no product leaves 63 bits."""
    bound = max(1, (2**63 - 1) // compressed_vocab // 2)
    drawn = numpy.random.default_rng(10007 * layer).integers(0, bound, max_order, numpy.int64)
    return tuple(2 * int(value) + 1 for value in drawn)


class NgramHash(nn.Module):
    """Token ids -> the table rows of every token, for one layer. Constant: nothing is learned.

    `token_map` gives each token id its class; it is a saved buffer, to be filled from the tokenizer
    (`engram_hash.token_map`). It starts as id modulo the number of classes; where that is the
    vocabulary itself, classes are ids and there is no buffer.
    """

    token_map: Tensor | None
    multipliers: Tensor
    sizes: Tensor
    offsets: Tensor

    def __init__(
        self, dims: ModelDims, layer: int, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.dims = dims
        self.layer = layer
        for name, values in self._constants().items():
            self.register_buffer(name, values.to(device or "cpu"), persistent=False)
        is_identity = dims.engram_compressed_vocab == dims.vocab_size
        token_map = None if is_identity else self._default_map().to(device or "cpu")
        self.register_buffer("token_map", token_map)

    def _default_map(self) -> Tensor:
        return torch.arange(self.dims.vocab_size) % self.dims.engram_compressed_vocab

    def _constants(self) -> dict[str, Tensor]:
        dims = self.dims
        multipliers = hash_multipliers(
            self.layer, dims.engram_max_order, dims.engram_compressed_vocab
        )
        sizes = bucket_sizes(dims)[dims.engram_layers.index(self.layer)]
        offsets = [0, *accumulate(sizes[:-1])]
        return {
            "multipliers": torch.tensor(multipliers),
            "sizes": torch.tensor(sizes),
            "offsets": torch.tensor(offsets),
        }

    def reset_buffers(self) -> None:
        """Fills the constants again, after a module was made on the meta device."""
        for name, values in self._constants().items():
            self.get_buffer(name).copy_(values)
        if self.token_map is not None:
            self.token_map.copy_(self._default_map())

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor, masked_BT: Tensor | None = None
    ) -> Tensor:
        """[B, T, H] int64 rows. The n-gram of order g + 1 is the token and the g before it; once it
        leaves the document or meets a masked token, the pad token stands from there on."""
        classes_BT, pad = ids_BT, torch.full_like(ids_BT[:1, :1], self.dims.engram_pad_id)
        if self.token_map is not None:
            classes_BT, pad = self.token_map[ids_BT], self.token_map[pad]
        hashes: list[Tensor] = []
        combined_BT = torch.zeros_like(classes_BT)
        is_cut_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
        for back in range(self.dims.engram_max_order):
            is_cut_BT = is_cut_BT | (positions_BT < back)
            if masked_BT is not None:
                is_cut_BT = is_cut_BT | _shifted(masked_BT, back)
            token_BT = torch.where(is_cut_BT, pad, _shifted(classes_BT, back))
            combined_BT = combined_BT ^ (token_BT * self.multipliers[back])
            if back > 0:
                hashes.append(combined_BT)
        hashes_BTH = torch.stack(hashes, -1).repeat_interleave(self.dims.engram_heads, -1)
        return hashes_BTH % self.sizes + self.offsets


def _shifted(x_BT: Tensor, back: int) -> Tensor:
    """x of the token `back` places earlier; what stands before the row's start is never used."""
    return functional.pad(x_BT, (back, 0))[:, : x_BT.shape[1]]


@named_op("engram_rows(Tensor table, Tensor rows) -> Tensor")
def _engram_rows(table: Tensor, rows_BTH: Tensor) -> Tensor:
    return functional.embedding(rows_BTH, table)


class _Lookup(torch.autograd.Function):
    """table[rows]. The backward adds to those rows of the table's `.grad` and gives autograd
    nothing: its own gradient would be a second table, nearly all of it zeros."""

    @staticmethod
    def forward(ctx: Any, rows_BTH: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(rows_BTH)
        ctx.parameter = table
        return _engram_rows(table, rows_BTH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (rows_BTH,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            add_row_grads(ctx.parameter, rows_BTH.flatten(), grad.flatten(0, -2))
        return None, None


def add_row_grads(table: Tensor, rows_N: Tensor, grad_NW: Tensor) -> None:
    """Adds grad_n to row rows_n of `table.grad`, in place; without one, it is made of zeros first.

    What falls on one row is summed first, in fp32 and in the order of n: the bits of a dense
    gradient that is then added, repeatable on a GPU too. Needs N W numbers, and no wait for the
    device.
    """
    with torch.no_grad():
        if table.grad is None:
            table.grad = torch.zeros_like(table)
        if not len(rows_N):
            return
        sorted_N, order_N = rows_N.sort(stable=True)
        places_N = torch.arange(len(sorted_N), device=sorted_N.device)
        starts_N = torch.ones_like(sorted_N, dtype=torch.bool)
        starts_N[1:] = sorted_N[1:] != sorted_N[:-1]
        # Of several gradients for a row the first one's place takes the sum, the others' take 0.
        first_N = torch.where(starts_N, places_N, 0).cummax(0).values
        counts_N = torch.zeros_like(first_N).index_add_(0, first_N, torch.ones_like(first_N))
        sums_NW = torch.segment_reduce(
            widened(grad_NW)[order_N], "sum", lengths=counts_N, unsafe=True, initial=0
        )
        table.grad.index_add_(0, sorted_N, sums_NW.to(table.grad.dtype))


@named_op("engram_linear(Tensor x, Tensor weight) -> Tensor")
def _engram_linear(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x, weight)


class Engram(nn.Module):
    """Adds gate_i * value to stream i; value and keys come from the looked-up rows."""

    def __init__(
        self,
        dims: ModelDims,
        layer: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims = dims
        num_streams, hidden = dims.num_streams, dims.hidden_size
        sizes = bucket_sizes(dims)[dims.engram_layers.index(layer)]
        row_width = dims.engram_head_dim
        self.hash = NgramHash(dims, layer, device=device)
        self.table = nn.Parameter(torch.empty(sum(sizes), row_width, device=device, dtype=dtype))
        self.projection = Linear(
            len(sizes) * row_width,
            (num_streams + 1) * hidden,
            device=device,
            dtype=dtype,
            product=_engram_linear,
        )
        """One key per stream, then the value."""
        self.query = nn.Parameter(torch.empty(num_streams, hidden, device=device, dtype=dtype))
        self.key = nn.Parameter(torch.empty(num_streams, hidden, device=device, dtype=dtype))

    def forward(
        self,
        streams_BTSD: Tensor,
        ids_BT: Tensor,
        positions_BT: Tensor,
        masked_BT: Tensor | None = None,
    ) -> Tensor:
        """The updated streams. Gate and sum are fp32; masked tokens stay as they are."""
        num_streams, hidden = streams_BTSD.shape[-2:]
        rows_BTH = self.hash(ids_BT, positions_BT, masked_BT)
        found: Tensor = _Lookup.apply(rows_BTH, self.table)  # type: ignore[no-untyped-call]
        found = found.flatten(-2)
        keys, value_BTD = self.projection(found).split([num_streams * hidden, hidden], dim=-1)
        gate_BTS1 = self._gate(streams_BTSD, keys.unflatten(-1, (num_streams, hidden)))
        if masked_BT is not None:
            gate_BTS1 = gate_BTS1.masked_fill(masked_BT[..., None, None], 0)
        added = gate_BTS1 * widened(value_BTD).unsqueeze(-2)
        return (widened(streams_BTSD) + added).to(streams_BTSD.dtype)

    def _gate(self, streams_BTSD: Tensor, keys_BTSD: Tensor) -> Tensor:
        """[B, T, S, 1]: sigmoid of the signed root of the normalised product of stream and key."""
        streams, keys = widened(streams_BTSD), widened(keys_BTSD)
        eps = self.dims.norm_eps
        weights = widened(self.query) * widened(self.key)
        product = (streams * weights * keys).sum(-1, keepdim=True)
        scale = inverse_rms(streams, eps) * inverse_rms(keys, eps) * streams.shape[-1] ** -0.5
        match = product * scale
        return torch.copysign(match.abs().clamp_min(1e-6).sqrt(), match).sigmoid()
