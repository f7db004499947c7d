"""Bytes of a layer's routed experts: what a forward of theirs leaves, and what a backward makes.

Pure, no torch. `pieces` lists the tensors from the routing weights to the experts' sum, for every
way to compute experts and to reach them. Over several ranks sizes are those of even routing: every
rank gets as many rows as it sends, every expert as many as another.

Letters: N tokens, K experts per token, A = N K pairs, E experts, L those here, D model width,
F inner width, P pool rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb

from ppruntime.models.dims import ModelDims
from ppruntime.models.fp8_expert_rules import BLOCK, most_rows, waiting_bytes
from ppruntime.models.mega_moe_rules import most_pool_rows
from ppruntime.models.row_slices import token_slices

_FP32, _INT64, _INT32, _BF16, _FP8 = 4, 8, 4, 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertForm:
    """Who computes a layer's routed experts and how rows reach them."""

    fp8: bool = False
    """By `fp8_experts`, whatever its backend; else in the compute dtype."""
    keeps_z: bool = True
    """FP8: what the first product gives is kept for the backward."""
    num_ranks: int = 1
    """Over which a layer's experts lie."""
    dispatcher: str = "here"
    """torch, deep_ep or mega_moe; here: nothing is sent."""
    fp8_wire: bool = False
    """torch, deep_ep: tokens travel in FP8."""
    num_chunks: int = 1
    """deep_ep: parts of a micro-batch."""
    by_expert: bool = False
    """torch in the compute dtype over several ranks: rows are sorted once more on arrival, for
    products that take each expert's together, as bf16 on a GPU does."""
    fused_swiglu: bool = False
    """The shared expert's SwiGLU, and that of routed ones in the compute dtype, is an op."""


HERE = ExpertForm()
"""All on one rank, in the compute dtype."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor."""

    num_bytes: int
    op: str | None
    """The op that it comes out of, as `save_points.op_name` has it; None: of no registered one."""
    is_saved: bool
    """Whether autograd saves it."""


def pieces(dims: ModelDims, form: ExpertForm, num_tokens: int, item: int) -> list[Piece]:
    """All tensors from the routing weights on, of `num_tokens` tokens in a compute dtype of `item`
    bytes. Few numbers on the host are not counted."""
    sizes = _Sizes(dims, form, num_tokens, item)
    match form.dispatcher:
        case "deep_ep":
            return [*_deep_ep(sizes)]
        case "mega_moe":
            return [*_mega_moe(sizes)]
        case "torch":
            return [*(_fp8_rows(sizes) if form.fp8 else _plain_rows(sizes))]
        case _:
            return [*(_fp8_here(sizes) if form.fp8 else _plain_here(sizes))]


def products_op(form: ExpertForm) -> str:
    """The op that makes the experts' products."""
    if form.dispatcher in ("deep_ep", "mega_moe"):
        return "expert_tokens" if form.dispatcher == "deep_ep" else "expert_mega_moe"
    return "fp8_experts" if form.fp8 else "expert_linear"


def saved_by_experts(dims: ModelDims, form: ExpertForm, num_tokens: int, item: int) -> int:
    """What autograd saves of them."""
    return sum(piece.num_bytes for piece in pieces(dims, form, num_tokens, item) if piece.is_saved)


def put_off_by_experts(dims: ModelDims, form: ExpertForm, num_tokens: int, item: int) -> int | None:
    """What they hold between their input gradient and a put-off weight gradient; None by deep_ep
    or mega_moe. In the compute dtype: rows and the gradients of results, inner values and the
    gradients of gate and up. In FP8: see `waiting_bytes`."""
    if form.dispatcher in ("deep_ep", "mega_moe"):
        return None
    pairs = num_tokens * dims.experts_per_token
    if not form.fp8:
        return item * pairs * (2 * dims.hidden_size + 3 * dims.expert_width)
    here = -(-dims.num_experts // form.num_ranks)
    # From other ranks a row comes once per expert.
    tokens, per_token = (num_tokens, dims.experts_per_token)
    if form.num_ranks > 1:
        tokens, per_token = pairs, 1
    widest = max(2 * dims.expert_width, dims.hidden_size)
    return sum(
        waiting_bytes(part.stop - part.start, per_token, here, dims.hidden_size, dims.expert_width)
        for part in token_slices(tokens, per_token, here, widest)
    )


def experts_workspace(dims: ModelDims, form: ExpertForm, num_tokens: int, item: int) -> int:
    """What their backward holds at once at the most, beside what is saved; the layout's and the
    routing's numbers apart. In the compute dtype: a gradient of rows, and of gate and up.

    In FP8 these are, with one scale for 128 values each: columns of dy all along; beside them d in
    bf16 with rows and columns of [dg | du] and columns of h that are made of it, and z if it was
    not kept; after that these, the gradient of rows in bf16 and what it is summed to.
    """
    width, hidden = dims.expert_width, dims.hidden_size
    pairs = num_tokens * dims.experts_per_token
    if not form.fp8:
        return item * pairs * (hidden + 2 * width)
    num_rows = most_rows(pairs, -(-dims.num_experts // form.num_ranks))
    made = num_rows * (hidden + 5 * width)
    made += _FP32 * made // BLOCK
    inner = _BF16 * num_rows * width * (1 if form.keeps_z else 3)
    outer = _BF16 * num_rows * hidden + item * num_tokens * hidden
    return made + max(inner, outer)


@dataclass(frozen=True, slots=True)
class _Sizes:
    dims: ModelDims
    form: ExpertForm
    tokens: int
    item: int

    @property
    def pairs(self) -> int:
        return self.tokens * self.dims.experts_per_token

    @property
    def num_here(self) -> int:
        return -(-self.dims.num_experts // self.form.num_ranks)

    @property
    def rows(self) -> int:
        """Bytes of a row for every pair, D wide."""
        return self.item * self.pairs * self.dims.hidden_size

    def message(self, num_rows: int) -> int:
        """Bytes of so many tokens as they travel."""
        return self.in_fp8(num_rows) if self.form.fp8_wire else self.wide(num_rows)

    def wide(self, num_rows: int) -> int:
        return self.item * num_rows * self.dims.hidden_size

    def in_fp8(self, num_rows: int) -> int:
        """Rows D wide with a scale for 128 values."""
        groups = self.dims.hidden_size // BLOCK
        return num_rows * (self.dims.hidden_size + _FP32 * groups)


def _result(num_bytes: int, op: str, *, saved: bool = True) -> Piece:
    return Piece(num_bytes, op, saved)


def _saved(num_bytes: int) -> Piece:
    return Piece(num_bytes, None, True)


def _inner(sizes: _Sizes, num_rows: int) -> Iterator[Piece]:
    """Gate and up, and their product, in the compute dtype."""
    yield _result(sizes.item * num_rows * 2 * sizes.dims.expert_width, "expert_linear")
    product = sizes.item * num_rows * sizes.dims.expert_width
    yield _result(product, "shared_swiglu") if sizes.form.fused_swiglu else _saved(product)


def _plain_here(sizes: _Sizes) -> Iterator[Piece]:
    """Routing weights, two index lists; rows, what lies between the products, their results."""
    yield _saved((_FP32 + 2 * _INT64) * sizes.pairs)
    yield _result(sizes.rows, "expert_rows")
    yield from _inner(sizes, sizes.pairs)
    yield _result(sizes.rows, "expert_linear")


def _plain_rows(sizes: _Sizes) -> Iterator[Piece]:
    """The same where rows are exchanged: what came of rows and of results is saved, not what was
    sent. Out of FP8 or sorted by expert, rows are saved as they are then."""
    form = sizes.form
    yield _saved((_FP32 + 2 * _INT64) * sizes.pairs)
    yield _result(sizes.rows, "expert_rows", saved=False)
    as_it_came = not (form.fp8_wire or form.by_expert)
    yield _result(sizes.message(sizes.pairs), "expert_dispatch", saved=as_it_came)
    if not as_it_came:
        yield _saved(sizes.rows)
    if form.by_expert:
        yield _saved(2 * _INT64 * sizes.pairs)  # the way there and back
    yield from _inner(sizes, sizes.pairs)
    yield _result(sizes.rows, "expert_linear", saved=False)
    yield _result(sizes.rows, "expert_combine")


def _fp8_op(sizes: _Sizes, num_tokens: int, per_token: int) -> Iterator[Piece]:
    """FP8 experts over tokens of any routing: their sum, and what is left of a pool for the worst;
    in parts where 32-bit offsets do not reach."""
    dims, here = sizes.dims, sizes.num_here
    yield _result(sizes.wide(num_tokens), "fp8_experts", saved=False)
    widest = max(2 * dims.expert_width, dims.hidden_size)
    for part in token_slices(num_tokens, per_token, here, widest):
        tokens = part.stop - part.start
        yield from _fp8_pool(sizes, tokens, per_token, most_rows(tokens * per_token, here))


def _fp8_pool(sizes: _Sizes, num_tokens: int, per_token: int, num_rows: int) -> Iterator[Piece]:
    """What FP8 experts leave in a pool of so many rows: z, x8 with its scales, the layout."""
    op = products_op(sizes.form)
    yield _result(_BF16 * num_rows * 2 * sizes.dims.expert_width * sizes.form.keeps_z, op)
    yield _result(sizes.in_fp8(num_tokens), op)
    indices = num_rows + num_tokens * per_token + num_rows // BLOCK + 2 * sizes.num_here + 1
    yield _result(_INT32 * indices, op)


def _fp8_here(sizes: _Sizes) -> Iterator[Piece]:
    """Routing weights, and all that the op gives."""
    yield _saved(_FP32 * sizes.pairs)
    yield from _fp8_op(sizes, sizes.tokens, sizes.dims.experts_per_token)


def _fp8_rows(sizes: _Sizes) -> Iterator[Piece]:
    """Two index lists; rows as they were sent and as they came, with their weights; the op, to
    which every row is a token; what came back."""
    yield _saved(2 * _INT64 * sizes.pairs)
    yield _result(sizes.rows, "expert_rows", saved=False)
    yield _result(sizes.message(sizes.pairs), "expert_dispatch", saved=False)
    yield _result(_FP32 * sizes.pairs, "expert_dispatch")
    yield from _fp8_op(sizes, sizes.pairs, 1)
    yield _result(sizes.rows, "expert_combine", saved=False)


def tokens_received(dims: ModelDims, num_ranks: int, num_tokens: int) -> int:
    """Tokens that reach a rank if each goes once to every rank with one of its experts, and experts
    are drawn at random."""
    here, per_token = dims.num_experts // num_ranks, dims.experts_per_token
    elsewhere = comb(dims.num_experts - here, per_token) / comb(dims.num_experts, per_token)
    return round(num_ranks * num_tokens * (1 - elsewhere))


def _deep_ep(sizes: _Sizes) -> Iterator[Piece]:
    """The sum for every token; of each chunk, experts and weights of what came, and what the
    experts leave. Tokens received are those of random routing; DeepEP's own handle, some numbers a
    token, is not counted."""
    dims, form, op = sizes.dims, sizes.form, products_op(sizes.form)
    yield _result(sizes.wide(sizes.tokens), op, saved=False)
    for part in _even_parts(sizes.tokens, form.num_chunks):
        received = tokens_received(dims, form.num_ranks, part)
        per_token = dims.experts_per_token
        yield _result((_INT64 + _FP32) * received * per_token, op)
        pairs = part * per_token
        if form.fp8:
            pool = padded_evenly(pairs, sizes.num_here)
            yield from _fp8_pool(sizes, received, per_token, pool)
        else:
            yield _result(sizes.item * pairs * 2 * dims.expert_width, op)
            yield _result(sizes.message(received), op)


def _mega_moe(sizes: _Sizes) -> Iterator[Piece]:
    """The sum for every token, in fp32 unless experts are in FP8; the pool, which has room for a
    fair share whatever came: z, rows, three numbers a row; each pair's place; the plan. Tensors are
    cut to the rows there are, their memory is not."""
    dims, form, here = sizes.dims, sizes.form, sizes.num_here
    op = products_op(form)
    room = most_pool_rows(1.0, sizes.pairs, here)
    of_sum = sizes.item if form.fp8 else _FP32
    yield _result(of_sum * sizes.tokens * dims.hidden_size, op, saved=False)
    z = _BF16 * room * 2 * dims.expert_width
    yield _result(z, op, saved=form.keeps_z or not form.fp8)
    yield _result(sizes.in_fp8(room) if form.fp8 else _BF16 * room * dims.hidden_size, op)
    yield _result((2 * _INT32 + _FP32) * room, op)
    words = 2 * here + 1 + 2 * form.num_ranks * here + room // BLOCK
    yield _result(_INT32 * (sizes.pairs + words), op)


def padded_evenly(num_pairs: int, num_experts: int) -> int:
    """Pool rows where every expert gets as many."""
    per_expert = -(-num_pairs // num_experts)
    return -(-per_expert // BLOCK) * BLOCK * num_experts


def _even_parts(number: int, num_parts: int) -> list[int]:
    """As even as can be, the larger ones first."""
    least, more = divmod(number, num_parts)
    return [least + (part < more) for part in range(num_parts)]
