"""Engram: rows looked up by hashes of the last tokens, gated into the residual streams.

Shape letters: B sequences, T tokens, G tokens of the longest n-gram, H columns = table rows per
token (orders 2 to G, each with `engram_heads` hash functions), S streams, D model width.
Source: DeepSeek-V4.1 report, section 2.4.2; the hash constants reproduce the released tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import ModelDims
from ppruntime.models.engram_hash import bucket_sizes
from ppruntime.models.engram_kernels import REFERENCE, EngramKernels
from ppruntime.models.engram_rows import TableRows, in_groups, rows_held
from ppruntime.models.keep_inputs import named_op
from ppruntime.models.linear import Linear
from ppruntime.models.precision import widened
from ppruntime.models.weight_copies import WeightCopies


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


@named_op("engram_rows(Tensor table, Tensor rows, ScalarType dtype) -> Tensor")
def _engram_rows(table: Tensor, rows_BTH: Tensor, dtype: torch.dtype) -> Tensor:
    return functional.embedding(rows_BTH, table).to(dtype)


_SOURCES: WeakValueDictionary[str, TableRows] = WeakValueDictionary()
"""Ops take names, not objects."""


@named_op("engram_fetched(Tensor rows, str source) -> Tensor")
def _engram_fetched(rows_BTH: Tensor, source: str) -> Tensor:
    return _SOURCES[source].fetch(rows_BTH)


class _Lookup(torch.autograd.Function):
    """table[rows]. The backward adds to those rows of the table's `.grad` and gives autograd
    nothing: its own gradient would be a second table, nearly all of it zeros."""

    @staticmethod
    def forward(ctx: Any, rows_BTH: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows_BTH)
        ctx.parameter = table
        return _engram_rows(table, rows_BTH, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (rows_BTH,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            add_row_grads(ctx.parameter, rows_BTH.flatten(), grad.flatten(0, -2))
        return None, None, None


class _FetchedRows(torch.autograd.Function):
    """The same of a table that `TableRows` stands before. `table` says that there is a gradient."""

    @staticmethod
    def forward(ctx: Any, rows_BTH: Tensor, table: Tensor, source: TableRows) -> Tensor:
        ctx.save_for_backward(rows_BTH)
        ctx.source, ctx.routes = source, source.routes_of(rows_BTH)
        name = str(id(source))
        _SOURCES[name] = source
        return _engram_fetched(rows_BTH, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (rows_BTH,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.source.add(rows_BTH, ctx.routes, grad)
        return None, None, None


def look_up(
    rows_BTH: Tensor, table: Tensor, dtype: torch.dtype, source: TableRows | None = None
) -> Tensor:
    """[B, T, H, W] in `dtype`: the table's rows, from `source` if one stands before it. The
    backward adds to `table.grad`, or to what `source` gathers."""
    if source is None:
        found: Tensor = _Lookup.apply(rows_BTH, table, dtype)  # type: ignore[no-untyped-call]
    else:
        found = _FetchedRows.apply(rows_BTH, table, source)  # type: ignore[no-untyped-call]
    return found


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


@dataclass(frozen=True, slots=True)
class EngramOptions:
    """How an Engram is computed, and which part of its table is here."""

    kernels: EngramKernels = REFERENCE
    rank: int = 0
    num_ranks: int = 1
    """Its rows are cut over so many ranks, see `engram_rows.rows_held`."""
    tables_on_host: bool = False


ALL_HERE = EngramOptions()
"""Plain PyTorch, with the whole table beside the other parameters."""


class Engram(WeightCopies):
    """Adds gate_i * value to stream i; value and keys come from the looked-up rows.

    `table` has the rows from `first_row` on that this rank holds. Whoever makes it a part, or wants
    rows ahead of the forward, hands a `TableRows` to `read_through`: then rows come from there, and
    gradients go there until `flush_weight_grads`.
    """

    def __init__(
        self,
        dims: ModelDims,
        layer: int,
        *,
        options: EngramOptions = ALL_HERE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.kernels = dims, options.kernels
        num_streams, hidden = dims.num_streams, dims.hidden_size
        sizes = bucket_sizes(dims)[dims.engram_layers.index(layer)]
        row_width = dims.engram_head_dim
        self.hash = NgramHash(dims, layer, device=device)
        self.num_rows = sum(sizes)
        held = rows_held(self.num_rows, options.rank, options.num_ranks)
        self.first_row = held.start
        place = "cpu" if options.tables_on_host else device
        self.table = nn.Parameter(torch.empty(len(held), row_width, device=place, dtype=dtype))
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
        self.source: TableRows | None = None
        self._as_gradient: Callable[[Tensor], Tensor] = Tensor.detach

    def read_through(self, source: TableRows, as_gradient: Callable[[Tensor], Tensor]) -> None:
        """From now on rows come from `source`. `as_gradient` makes of its sums what `table.grad`
        takes."""
        self.source, self._as_gradient = source, as_gradient

    def announce(self, batches: Iterable[MicroBatch]) -> None:
        """The micro-batches of the step that begins, in their order; see `TableRows.announce`."""
        assert self.source is not None, "rows are announced to a source"
        self.source.announce(rows for group in in_groups(batches) for rows in self._rows_of(group))

    def _rows_of(self, batches: Sequence[MicroBatch]) -> Sequence[Tensor]:
        """What each micro-batch reads, hashed together: a hash looks at one sequence."""
        masked = [b.masked for b in batches if b.masked is not None]
        assert len(masked) in (0, len(batches)), "all of a step's micro-batches are masked, or none"
        rows: Tensor = self.hash(
            torch.cat([b.ids for b in batches]),
            torch.cat([b.positions for b in batches]),
            torch.cat(masked) if masked else None,
        )
        return torch.split(rows, [len(b.ids) for b in batches])

    def flush_weight_grads(self) -> None:
        if self.source is not None and (sums := self.source.flush()) is not None:
            self.table.grad = self._as_gradient(sums)

    def forward(
        self,
        streams_BTSD: Tensor,
        ids_BT: Tensor,
        positions_BT: Tensor,
        masked_BT: Tensor | None = None,
    ) -> Tensor:
        """The updated streams. Gate and sum are fp32; masked tokens stay as they are."""
        rows_BTH = self.hash(ids_BT, positions_BT, masked_BT)
        dtype = self.projection.weight.dtype
        found = look_up(rows_BTH, self.table, dtype, self.source).flatten(-2)
        return self.kernels.gated(
            streams_BTSD,
            self.projection(found),
            self.query,
            self.key,
            masked_BT,
            self.dims.norm_eps,
        )
