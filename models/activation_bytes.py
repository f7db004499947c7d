"""Bytes that autograd keeps of a unit from its forward to its backward, worked out from sizes.

Stands for the readable path. Pure, no torch: a test holds every formula against what autograd
really saves, to the byte. The kernels keep less, each says how much.

A formula lists what the operations of one module save, in their order. Rules that recur:
a product saves the factor of whoever needs a gradient; a linear layer saves its input, and so does
a softmax its output; norms, SwiGLU, sparse attention and what mHC does to the streams save what
they get as it came; where something else widens a bf16 tensor to fp32, what is saved is the copy,
once more for every widening, while an fp32 tensor is its own copy and counts once.

Letters: B sequences, T tokens, N = B T, D model width, S streams, H heads, K key width, Q query
bottleneck, W slots, C compressed entries of a sequence, R tokens of an entry, P rotated pairs,
E experts, A = N experts_per_token rows of experts, F inner width.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from ppruntime.models.dims import (
    DTYPE_BYTES,
    ModelDims,
    Role,
    UnitKind,
    UnitSpec,
    num_candidate_blocks,
)
from ppruntime.models.expert_bytes import (
    HERE,
    ExpertForm,
    experts_workspace,
    pieces,
    put_off_by_experts,
    saved_by_experts,
)
from ppruntime.models.fp8_linear_rules import BLOCK
from ppruntime.models.kernel_limits import AttentionOp, queries_at_once
from ppruntime.models.product_ops import Products
from ppruntime.models.save_points import is_kept

_FP32, _INT64, _INT32, _BF16, _BOOL = 4, 8, 4, 2, 1


def saved_bytes(
    dims: ModelDims,
    spec: UnitSpec,
    batch: int,
    seq_len: int,
    dtype: str,
    *,
    head: str = "reference",
    mhc: str = "reference",
    engram: str = "reference",
    attention_kernel: bool = False,
    wide_products: bool = False,
    router: str = "reference",
    fp8_linears: bool = False,
    experts: ExpertForm = HERE,
) -> int:
    """What autograd saves in one unit for `batch` sequences of `seq_len` tokens, each piece of
    memory once; parameters, token data and the carry that comes in and goes out not counted.

    `dtype` is the compute dtype, float32 or bfloat16. No token is masked from Engram. `head` is the
    loss by its name in `head.head_loss`, `mhc` the residual's in `residual.residual`, `engram` the
    gate's in `engram_kernels.engram_kernels`, "auto" apart.
    `attention_kernel`: sparse attention is the op of its kernels, whatever computes it.
    `wide_products`: compressors' fp32 products need no fp32 copy of their input. `router`: as
    `moe_kernels.moe_kernels` has it, "auto" apart. `fp8_linears`: dense linears are in FP8, see
    `fp8_linear_rules`. `experts`: how the routed experts are computed and reached.

    Rows that pad a turned FP8 query to 128 are not counted.
    The kernels of rope, grouped output, norms, the indexer and SwiGLU save what the reference does.
    """
    run = _Run(
        *(dims, batch, seq_len, DTYPE_BYTES[dtype], mhc, engram, wide_products, router),
        fp8_linears=fp8_linears,
        experts=experts,
    )
    match spec.kind:
        case UnitKind.EMBED:
            return 0
        case UnitKind.HEAD:
            return _head(run, head)
        case UnitKind.MOE:
            return _residual(run) + _moe(run)
        case _:
            kernel = _attention_kernel(run, spec) if attention_kernel else 0
            return _attention_half(run, spec) + kernel


def kept_fields(
    dims: ModelDims,
    spec: UnitSpec,
    batch: int,
    seq_len: int,
    dtype: str,
    *,
    engram: str = "reference",
) -> frozenset[str]:
    """Fields of the carry, got or given, whose memory autograd keeps for the unit's backward. Sums
    over keys and copies to another dtype keep none of theirs."""
    if spec.kind is UnitKind.EMBED:
        return frozenset()
    run = _Run(dims, batch, seq_len, DTYPE_BYTES[dtype])
    # Engram makes streams of its own, and in a low dtype the reference saves those that it gets as
    # copies.
    copies = run.is_low and engram == "reference"
    kept = set() if copies and spec.engram_parameters else {"streams"}
    if dims.hands_on_mix:
        kept.add("mix")
    if spec.role in _SHARE_SLOTS and _slots_live_on(spec):
        kept.add("slots")
    return frozenset(kept)


@dataclass(frozen=True, slots=True)
class Kept:
    """Results of ops that a recomputed unit keeps beside its inputs."""

    num_bytes: int
    saved_again: int
    """Of these, bytes that autograd saves too once the rest is computed again: they are there
    already, all else that it saves is made anew."""
    fields: frozenset[str] = frozenset()
    """Fields of the carry that the unit gives and keeps as well; `num_bytes` is without them."""


def kept_results(
    dims: ModelDims,
    spec: UnitSpec,
    kept: Set[str],
    batch: int,
    seq_len: int,
    dtype: str,
    *,
    kernels: Set[AttentionOp] = frozenset(),
    mhc: str = "reference",
    engram: str = "reference",
    router: str = "reference",
    fp8_linears: bool = False,
    experts: ExpertForm = HERE,
) -> Kept:
    """What a half layer keeps between its forward and its recompute of the groups and ops that
    `kept` names (`save_points`); of an op that its kernels do not run, nothing. `kernels`:
    operations of attention that are not the reference's. All else as in `saved_bytes`."""
    assert spec.layer is not None
    run = _Run(
        *(dims, batch, seq_len, DTYPE_BYTES[dtype], mhc, engram),
        router=router,
        fp8_linears=fp8_linears,
        experts=experts,
    )
    products = Products(
        dims=dims,
        layer=spec.layer,
        is_low=run.is_low,
        kernels=kernels,
        mhc=mhc,
        router=router,
        fp8_linears=fp8_linears,
        experts=experts,
    )
    if spec.kind is UnitKind.ATTENTION:
        results = _attention_results(run, spec, products)
    else:
        results = _moe_results(run, spec, products)
    found = [result for result in results if is_kept(kept, result.op)]
    own = [result for result in found if result.field not in spec.live_after]
    return Kept(
        sum(result.num_bytes for result in own),
        sum(result.num_bytes for result in own if result.is_saved),
        frozenset(result.field for result in found if result.field in spec.live_after),
    )


def backward_workspace(
    dims: ModelDims,
    spec: UnitSpec,
    batch: int,
    seq_len: int,
    dtype: str,
    *,
    attention_kernel: bool = False,
    fp8_linears: bool = False,
    experts: ExpertForm = HERE,
    puts_off: bool = False,
) -> int:
    """Bytes that the backward of one unit makes and frees again, at the most, beside what autograd
    saved for it: the largest gradients inside a half and that of the streams around it; 0 for
    embedding and head (`head_bytes`).

    Around the routed experts in FP8 lies the gradient of x through the shared expert, whose
    backward runs first and has freed what it kept; if it `puts_off` its weight gradients their
    operands have taken that place.

    Without `attention_kernel` sparse attention's reference gathers every query's keys in fp32,
    block by block, and holds a block three times: the keys, and their gradients as keys and as
    values. Beside them lie scores and row numbers.
    """
    run = _Run(dims, batch, seq_len, DTYPE_BYTES[dtype], fp8_linears=fp8_linears)
    if spec.kind is UnitKind.MOE:
        inside = experts_workspace(dims, experts, run.tokens, run.item)
        return inside + run.item * run.streams + _beside_experts(run, puts_off=puts_off)
    if spec.kind is not UnitKind.ATTENTION:
        return 0
    heads = run.tokens * dims.num_heads * dims.head_dim
    around = run.item * (2 * heads + run.streams)  # gradients of q, of what is attended, of streams
    if attention_kernel:
        return around
    slots, width = _num_slots(run, spec), dims.head_dim
    block = batch * min(seq_len, queries_at_once(batch, slots, width))
    in_block = block * dims.num_heads * width
    return (
        around
        + _FP32 * (3 * block * slots * width + block * dims.num_heads * slots)
        + _INT64 * block * slots
        # In fp32: weighted values and the gradient of q; in a low dtype a widened q, too.
        + _FP32 * in_block
        + run.copy(in_block)
        + run.item * in_block
    )


def _beside_experts(run: _Run, *, puts_off: bool) -> int:
    """What a MoE half with an FP8 shared expert holds beside the routed experts' backward, see
    `backward_workspace`. The gradient of what the half gives has the place of what it gave."""
    if not run.fp8_linears:
        return 0
    wide, shared = run.dims.hidden_size, run.dims.num_shared_experts * run.dims.expert_width
    kept = run.item * run.tokens * 2 * shared
    operands = sum(map(run.columns, (wide, shared, 2 * shared))) if puts_off else 0
    kept += 0 if puts_off else run.columns(wide)
    return run.item * run.tokens * wide + operands - kept


@dataclass(frozen=True, slots=True)
class PutOff:
    """What put-off weight gradients of a unit read."""

    num_bytes: int
    """The carry's streams apart."""
    reads_streams: bool
    """Whether they read the streams that the unit gets, too."""


def put_off_operands(
    dims: ModelDims,
    spec: UnitSpec,
    batch: int,
    seq_len: int,
    dtype: str,
    *,
    head: str = "reference",
    mhc: str = "reference",
    wide_products: bool = False,
    router: str = "reference",
    fp8_linears: bool = False,
    experts: ExpertForm = HERE,
) -> PutOff | None:
    """What a unit holds between an input gradient and its put-off weight gradients, whatever it
    kept before: what its linear layers got, and the gradients of what they gave, each piece of
    memory once; in FP8 both as columns. All else as in `saved_bytes`. None where it is not known:
    another residual than mHC, an indexer that learns, experts by deep_ep or mega_moe.
    """
    if dims.residual_type != "mhc" or dims.indexer_learns:
        return None
    run = _Run(
        *(dims, batch, seq_len, DTYPE_BYTES[dtype], mhc),
        wide_products=wide_products,
        router=router,
        fp8_linears=fp8_linears,
        experts=experts,
    )
    tokens, wide, streams = run.tokens, dims.hidden_size, dims.num_streams
    match spec.kind:
        case UnitKind.EMBED:
            return PutOff(0, reads_streams=False)
        case UnitKind.HEAD:
            total = run.item * tokens * wide
            # In chunks the logits' gradient is made again, from a log-sum-exp.
            total += _FP32 * tokens if head == "chunked" else run.item * tokens * dims.vocab_size
            if dims.family != "v4":
                return PutOff(total, reads_streams=False)
            return PutOff(
                total + run.copy(run.streams) + _FP32 * tokens * streams,
                reads_streams=not run.is_low,
            )
    num_coefficients = 2 * streams + streams * streams
    coefficients = _FP32 * tokens * num_coefficients
    if run.mhc == "triton":  # in two parts
        coefficients = 2 * run.item * tokens * num_coefficients
    if spec.kind is UnitKind.MOE:
        routed = put_off_by_experts(dims, experts, tokens, run.item)
        if routed is None:
            return None
        return PutOff(coefficients + routed + _dense_moe_operands(run), reads_streams=True)
    has_engram = spec.engram_parameters > 0
    total = coefficients + _attention_operands(run, spec)
    if has_engram:
        rows = (dims.engram_max_order - 1) * dims.engram_heads * dims.engram_head_dim
        total += run.item * (tokens * (rows + (streams + 1) * wide) + run.streams)
    return PutOff(total, reads_streams=not has_engram)


def _dense_moe_operands(run: _Run) -> int:
    """Shared expert and router, whose input the reference widens. In FP8 the shared expert's are
    columns, and x itself is held if the router reads it as it is."""
    dims, tokens = run.dims, run.tokens
    wide, shared = dims.hidden_size, dims.num_shared_experts * dims.expert_width
    in_parts = run.router != "reference" and run.is_low
    router = (3 * _BF16 if in_parts else _FP32) * tokens * dims.num_experts
    router += 0 if in_parts else run.copy(tokens * wide)
    if not run.fp8_linears:
        # x and the gradient of y, the inner values and gradients of gate and up.
        return router + run.item * tokens * (2 * wide + 3 * shared)
    reads_x = in_parts or not run.is_low
    columns = sum(map(run.columns, (wide, wide, shared, 2 * shared)))
    return router + columns + run.item * tokens * wide * reads_x


def _attention_operands(run: _Run, spec: UnitSpec) -> int:
    """x, the query's latent, heads and groups of the output, and gradients: the latent's, the
    heads', the keys', the groups', y's; of compressors their widened input and two gradients."""
    assert spec.layer is not None
    dims, tokens = run.dims, run.tokens
    heads, groups = dims.num_heads * dims.head_dim, dims.o_groups * dims.o_lora_rank
    wide, latent = dims.hidden_size, dims.q_lora_rank
    if run.fp8_linears:  # of x, its gradients, and of what lies between; but keys, heads and groups
        total = sum(map(run.columns, (wide, latent, groups, latent, heads, wide)))
        total += run.item * tokens * (wide + dims.head_dim + heads + groups) + run.padding(groups)
    else:
        inputs = wide + latent + heads + groups
        total = run.item * tokens * (inputs + inputs + dims.head_dim)
    ratio = dims.compress_ratios[spec.layer]
    if spec.role is Role.FULL and ratio == 1:
        return total + run.item * tokens * dims.head_dim
    if spec.role in (Role.FULL, Role.CSA, Role.HCA) and run.seq_len >= ratio:
        width = dims.head_dim * (2 if spec.role is Role.CSA else 1)
        total += run.compressed + 2 * run.wide_gradient * tokens * width
    return total


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that an op gives."""

    op: str
    """Its name as `save_points.op_name` has it."""
    num_bytes: int
    is_saved: bool
    """Whether autograd saves that very piece of memory."""
    field: str = ""
    """Of the carry, if it goes out as one."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward: sizes, and `item`, the bytes of an element in the compute dtype."""

    dims: ModelDims
    batch: int
    seq_len: int
    item: int
    mhc: str = "reference"
    engram: str = "reference"
    wide_products: bool = False
    router: str = "reference"
    fp8_linears: bool = False
    experts: ExpertForm = HERE

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def is_low(self) -> bool:
        """Whether fp32 is wider than the compute dtype."""
        return self.item < _FP32

    def copy(self, numel: int) -> int:
        """Bytes of a widened copy of `numel` elements; in fp32 there is none."""
        return _FP32 * numel if self.is_low else 0

    @property
    def compressed(self) -> int:
        """Bytes of the copy of a compressor's input."""
        return 0 if self.wide_products else self.copy(self.tokens * self.dims.hidden_size)

    @property
    def wide_gradient(self) -> int:
        """Bytes of a number of an fp32 product's gradient as its weight gradient takes it: three
        parts where the product is of parts."""
        return 3 * _BF16 if self.wide_products else _FP32

    def columns(self, width: int) -> int:
        """Bytes of an FP8 linear's input as its backward takes it: columns of 128 rows, the last
        ones padded, each with a scale; with scales of whole tiles 3 % less."""
        blocks = -(-self.tokens // BLOCK)
        return blocks * width * (BLOCK + _FP32)

    def padding(self, width: int) -> int:
        """Bytes behind the rows of what an FP8 linear gives: of a product in bf16 the whole memory
        stays."""
        spare = -self.tokens % BLOCK
        return spare * self.item * width if self.fp8_linears and self.is_low else 0

    @property
    def streams(self) -> int:
        """Elements of all residual streams."""
        return self.tokens * self.dims.num_streams * self.dims.hidden_size


_SHARE_SLOTS = (Role.FULL, Role.REINDEX, Role.REUSE)


def _slots_live_on(spec: UnitSpec) -> bool:
    """Whether the slot list is one of the carry's: received, or made here and read later."""
    return spec.role is Role.REUSE or "slots" in spec.live_after


def _norm(run: _Run, rows: int, width: int) -> int:
    """RMSNorm: x and 1 / rms. What comes out is its reader's."""
    return run.item * rows * width + _FP32 * rows


def _residual(run: _Run) -> int:
    """All around a sublayer: coefficients, the mix of the collapse, norm, write-back. The streams
    are the carry's."""
    if run.dims.residual_type != "mhc":
        return _one_stream(run)
    dims, tokens, streams = run.dims, run.tokens, run.dims.num_streams
    own_mix = streams if dims.family == "v4" else 0  # in V4.1 it is the carry's
    if run.mhc == "triton":  # the norm's input and y; projection, two rms, post, comb
        per_token = 2 * streams + streams**2 + 2 + streams + streams**2 + own_mix
        return tokens * (2 * run.item * dims.hidden_size + _FP32 * per_token)
    return (
        _coefficients(run)
        + _FP32 * tokens * own_mix
        + _norm(run, tokens, dims.hidden_size)
        + run.item * tokens * dims.hidden_size  # write-back: y, post
        + _FP32 * tokens * streams
    )


def _one_stream(run: _Run) -> int:
    """The norm's 1 / rms and y; with a gate 1 / rms again, the projection before and after it is
    divided, the sigmoid, the gate. The kernel has one 1 / rms, the projection and the gate."""
    per_token = 1
    if run.dims.residual_type == "gated":
        per_token = 3 if run.mhc == "triton" else 6
    return run.tokens * (run.item * run.dims.hidden_size + _FP32 * per_token)


def _coefficients(run: _Run) -> int:
    """mHC: 1 / rms, the projection before and after the scale, the scale, two sigmoids; Sinkhorn's
    softmax, and a sum and a matrix per step, the last one the result."""
    tokens, streams = run.tokens, run.dims.num_streams
    square = streams * streams
    coefficients = 2 * streams + square
    sinkhorn = square + (2 * run.dims.sinkhorn_iters - 1) * (streams + square)
    per_token = 1 + 2 * coefficients + 2 * streams + sinkhorn
    return _FP32 * (tokens * per_token + coefficients)


def _rope(run: _Run, rows: int) -> int:
    """Cosines and sines of some positions."""
    return 2 * _FP32 * rows * (run.dims.rope_dim // 2)


def _attention_half(run: _Run, spec: UnitSpec) -> int:
    assert spec.layer is not None
    dims = run.dims
    total = _residual(run) + _projections(run, spec) + _core(run, spec)
    if spec.layer in dims.engram_layers:
        total += _engram(run) + run.item * run.streams  # those it gives are not the carry's
    ratio = dims.compress_ratios[spec.layer]
    if dims.family == "v4":
        total += _query_norm(run)
        if spec.role is not Role.SWA:
            total += _compressor_v4(run, ratio, overlaps=spec.role is Role.CSA)
    elif spec.role is Role.FULL:
        total += _compressor_v41(run, ratio)
    return total + (_indexer(run, spec) if dims.indexer_learns else 0)


def _indexer(run: _Run, spec: UnitSpec) -> int:
    """An indexer that learns: what makes its keys, and the gradients of queries, head weights and
    keys that its loss has made; frozen it saves nothing."""
    assert spec.layer is not None
    dims, width = run.dims, run.dims.index_head_dim
    if spec.role not in (Role.FULL, Role.REINDEX, Role.CSA):
        return 0
    entries = run.batch * _num_entries(run, spec)
    total = run.item * (run.tokens * dims.index_heads * (width + 1) + entries * width)
    if spec.role is Role.FULL:
        total += run.item * entries * dims.head_dim + _norm(run, entries, width)
    if spec.role is Role.CSA:
        total += _compressor_v4(run, dims.compress_ratios[spec.layer], overlaps=True, width=width)
    return total


def _projections(run: _Run, spec: UnitSpec) -> int:
    """x, the query's latent and its norm, the keys' norm, the rotation there and back, the heads
    and the groups of the output."""
    dims, tokens = run.dims, run.tokens
    latent, groups = dims.q_lora_rank, dims.o_groups * dims.o_lora_rank
    wide = dims.hidden_size + dims.num_heads * dims.head_dim
    inputs = run.item * tokens * (wide + latent + groups)
    if run.fp8_linears:  # the keys' projection still reads x
        inputs = run.item * tokens * wide
        inputs += sum(map(run.columns, (dims.hidden_size, latent, groups)))
        inputs += run.padding(latent) + run.padding(dims.hidden_size)  # what the norm gets, and y
        inputs += run.item * tokens * latent * _reads_latent(run, spec)  # the indexer's queries do
    back = _rope(run, tokens) // 2  # the sines, negated
    return (
        inputs
        + _norm(run, tokens, dims.q_lora_rank)
        + _norm(run, tokens, dims.head_dim)
        + _rope(run, tokens)
        + back
    )


def _query_norm(run: _Run) -> int:
    """V4: every head divided by its rms, as in a norm without weight."""
    heads = run.tokens * run.dims.num_heads
    width = run.dims.head_dim
    return _FP32 * (heads * width + heads) + run.copy(heads * width)


def _num_slots(run: _Run, spec: UnitSpec) -> int:
    """Keys listed for a query."""
    assert spec.layer is not None
    dims = run.dims
    if spec.role is Role.SWA:
        return dims.window
    if spec.role is Role.HCA:
        return dims.window + run.seq_len // dims.compress_ratios[spec.layer]
    return dims.num_slots


def _core(run: _Run, spec: UnitSpec) -> int:
    """Sparse attention: queries, keys, and the slot list if it is not the carry's."""
    dims, tokens = run.dims, run.tokens
    slots, queries = _num_slots(run, spec), tokens * dims.num_heads * dims.head_dim
    listed = _INT32 * tokens * slots
    if dims.family == "v41" and spec.role is Role.SWA:
        listed = _INT64 * tokens * slots
    elif spec.role in _SHARE_SLOTS and _slots_live_on(spec):
        listed = 0
    keys = run.batch * (run.seq_len + _num_entries(run, spec)) * dims.head_dim
    return run.item * (queries + keys) + listed


def _attention_kernel(run: _Run, spec: UnitSpec) -> int:
    """What the op of the kernels saves beside that: the log-sum-exp of every head, but no negated
    sines, and the slots of a window as int32. Its output is the output projection's input."""
    dims, tokens = run.dims, run.tokens
    more = _FP32 * tokens * dims.num_heads - _rope(run, tokens) // 2
    if dims.family == "v41" and spec.role is Role.SWA:
        more += (_INT32 - _INT64) * tokens * dims.window
    return more


def _num_entries(run: _Run, spec: UnitSpec) -> int:
    """Compressed entries among a sequence's keys."""
    assert spec.layer is not None
    ratio = run.dims.compress_ratios[spec.layer]
    return run.seq_len // ratio if ratio else 0


def _compressor_v41(run: _Run, ratio: int) -> int:
    """Ratio 1: a norm and a rotation. Above: x widened, indices of the gathered values and gates,
    values, softmax of the gates."""
    dims = run.dims
    entries = run.batch * (run.seq_len // ratio)
    total = _norm(run, entries, dims.head_dim) + _rope(run, entries)
    if ratio > 1:
        pooled = entries * ratio
        total += run.compressed
        total += 2 * _INT64 * pooled + 2 * _FP32 * pooled * dims.head_dim
    return total


def _compressor_v4(run: _Run, ratio: int, *, overlaps: bool, width: int | None = None) -> int:
    """As V4.1's. With `overlaps` an entry pools two groups, and which have none before them is
    saved. A sequence shorter than one group makes nothing. `width` of an entry: a key's, unless it
    is another."""
    dims = run.dims
    width = dims.head_dim if width is None else width
    entries = run.batch * (run.seq_len // ratio)
    if entries == 0:
        return 0
    pooled = entries * ratio * (2 if overlaps else 1)
    return (
        run.compressed
        + 2 * _INT64 * pooled
        + (_BOOL * entries if overlaps else 0)
        + 2 * _FP32 * pooled * width
        + _norm(run, entries, width)
        + _rope(run, entries)
    )


def _engram(run: _Run) -> int:
    """Row numbers and rows; both gate weights widened and their product; streams, keys and value
    widened (in fp32: the projection's output, of which keys and value are parts); streams times
    weights; nine steps of the gate."""
    dims, tokens = run.dims, run.tokens
    columns = (dims.engram_max_order - 1) * dims.engram_heads
    gates = dims.num_streams * dims.hidden_size
    value = tokens * dims.hidden_size
    keys_and_value = run.streams + value
    if run.engram == "triton":  # keys and value as they are; three numbers a stream
        return (
            (_INT64 + run.item * dims.engram_head_dim) * tokens * columns
            + run.item * keys_and_value
            + _FP32 * 3 * tokens * dims.num_streams
        )
    return (
        (_INT64 + run.item * dims.engram_head_dim) * tokens * columns
        + _FP32 * (gates + keys_and_value + run.streams + 9 * tokens * dims.num_streams)
        + run.copy(2 * gates + run.streams)
    )


def _moe(run: _Run) -> int:
    """x, router, routed experts, shared expert, balance loss. In FP8 the shared expert saves x in
    columns; the router in a low dtype a copy, and then nobody x itself."""
    dims, tokens, experts = run.dims, run.tokens, run.dims.num_experts
    rows = tokens * dims.experts_per_token
    x = tokens * dims.hidden_size
    picks = _INT64 * rows
    scored = run.copy(x) if run.router == "reference" else 0
    between = 0 if run.router == "triton" else tokens + rows  # the picks' scores and their sums
    router = scored + picks + _FP32 * (2 * tokens * experts + between)
    shared = _swiglu(run, tokens, dims.num_shared_experts * dims.expert_width)
    if run.fp8_linears:
        shared += run.columns(dims.hidden_size) - run.item * x * (scored > 0)
        shared += run.padding(2 * dims.num_shared_experts * dims.expert_width)
    routed = saved_by_experts(dims, run.experts, tokens, run.item)
    total = run.item * x + router + routed + shared
    if dims.balance_loss_weight:
        sums = 0 if run.router == "triton" else tokens
        total += _FP32 * (sums + run.batch * experts)  # sums of the scores, loads
    return total


def _swiglu(run: _Run, rows: int, width: int) -> int:
    """Gate and up, and the product that goes on, unless that goes in FP8 rows into the next."""
    return (2 if run.fp8_linears else 3) * run.item * rows * width


def _residual_results(run: _Run, products: Products, *, is_read: bool) -> list[_Result]:
    """Around a sublayer, whose input `is_read` as it came by its backward. By the reference: the
    projection of the streams before it is scaled, and the norm's result. By the kernels, which are
    an op before and one behind: the sublayer's input, what their backward reads, the streams."""
    dims, tokens = run.dims, run.tokens
    x = run.item * tokens * dims.hidden_size
    norm = _norm_results(run, products, tokens, dims.hidden_size, is_read=is_read)
    written = run.item * run.streams
    if dims.residual_type != "mhc":
        gate = _FP32 * tokens * (dims.residual_type == "gated")
        if run.mhc != "triton":
            return [_Result("mm", gate, True), *norm]
        return [
            _Result("one_stream_read", x, is_read),
            _Result("one_stream_read", _FP32 * tokens + 2 * gate, True),
            _Result("one_stream_write", written, False, "streams"),
        ]
    streams = dims.num_streams
    projected = _FP32 * tokens * (2 * streams + streams * streams)
    if run.mhc != "triton":
        return [_Result("mm", projected, True), *norm]
    weights = _FP32 * tokens * (2 + streams + streams * streams)  # two rms, post, comb
    mix = _FP32 * tokens * streams
    return [
        _Result("mhc_read", x, is_read),
        _Result("mhc_read", x + projected + weights, True),
        _Result("mhc_read", mix, True, "mix" if dims.hands_on_mix else ""),
        _Result("mhc_write", written, False, "streams"),
    ]


def _norm_results(
    run: _Run, products: Products, rows: int, width: int, *, is_read: bool, learns: bool = True
) -> list[_Result]:
    """A norm by its kernel: y, which is saved if a product reads it, and 1 / rms."""
    if AttentionOp.NORM not in products.kernels:
        return []
    y = _Result("rms_norm", run.item * rows * width, is_read)
    return [y, _Result("rms_norm", _FP32 * rows, learns)]


def _moe_results(run: _Run, spec: UnitSpec, products: Products) -> list[_Result]:
    """Those of the routed experts; the router's product and its picks, weights and scores; the
    shared expert's two products, of which the second is added to what the experts give, and what
    lies between. In FP8 also x in columns, and the second in bf16."""
    dims, tokens, item = run.dims, run.tokens, run.item
    shared = dims.num_shared_experts * dims.expert_width
    routed = pieces(dims, run.experts, tokens, item)
    of_sum = item * tokens * dims.hidden_size
    if run.fp8_linears:
        of_sum = _BF16 * -(-tokens // BLOCK) * BLOCK * dims.hidden_size
    gate_up = products.op("moe.shared.gate_up")
    # Else all that read the sublayer's input keep columns and a widened copy of it.
    is_read = not (run.fp8_linears and run.is_low and run.router == "reference")
    results = [
        *_residual_results(run, products, is_read=is_read),
        *(_Result(p.op, p.num_bytes, p.is_saved) for p in routed if p.op is not None),
        _Result(products.op("moe.router.gate"), _FP32 * tokens * dims.num_experts, True),
        _Result(gate_up, item * tokens * 2 * shared + run.padding(2 * shared), True),
        *_columns(run, gate_up, dims.hidden_size),
        _Result(products.op("moe.shared.down"), of_sum, False),
    ]
    if run.experts.fused_swiglu and not run.fp8_linears:
        results.append(_Result("shared_swiglu", item * tokens * shared, True))
    if run.router == "triton":
        pairs, form = tokens * dims.experts_per_token, run.experts
        weighs = form.dispatcher == "here" or (form.dispatcher == "torch" and not form.fp8)
        is_given = spec.role is Role.HASH or dims.force_balanced_routing
        results += [
            _Result("route", 0 if is_given else _INT64 * pairs, True),
            _Result("route", _FP32 * pairs, weighs),
            _Result("route", _FP32 * tokens * dims.num_experts, True),
        ]
        if dims.balance_loss_weight:
            results.append(_Result("mean_shares", _FP32 * run.batch * dims.num_experts, False))
    return results


def _columns(run: _Run, op: str, width: int) -> list[_Result]:
    """What an FP8 linear gives beside its product."""
    return [_Result(op, run.columns(width), True)] * run.fp8_linears


def _attention_results(run: _Run, spec: UnitSpec, products: Products) -> list[_Result]:
    """Query, its latent, keys, attention, the two output products; Engram's rows, projection and
    gate; norms and rotations by kernels; compressor and indexer. A query turned in place and a
    product in rows of tokens are read as they are; attention's kernels save their output and a
    log-sum-exp; an indexer's gives entries, and from the candidate source its blocks."""
    assert spec.layer is not None
    dims, tokens, item = run.dims, run.tokens, run.item
    kernels = products.kernels
    heads = tokens * dims.num_heads * dims.head_dim
    is_v4 = dims.family == "v4"
    turned = AttentionOp.ROPE in kernels and not is_v4
    in_rows = dims.o_groups == 1 or AttentionOp.GROUPED_OUTPUT in kernels
    latent, groups = dims.q_lora_rank, dims.o_groups * dims.o_lora_rank
    of_query = 0 if turned else run.padding(dims.num_heads * dims.head_dim)
    attended = AttentionOp.ATTENTION in kernels
    q_a, q_b, o_b = (products.op(f"attention.{name}") for name in ("q_a", "q_b", "o_b"))
    results = [
        *_residual_results(run, products, is_read=True),
        _Result(q_a, item * tokens * latent + run.padding(latent), True),
        *_columns(run, q_a, dims.hidden_size),
        *_norm_results(run, products, tokens, latent, is_read=_reads_latent(run, spec)),
        # V4 normalises the heads; a low dtype is widened for that.
        _Result(q_b, item * heads + of_query, turned or (is_v4 and not run.is_low)),
        *_columns(run, q_b, latent),
        _Result(products.op("attention.kv"), item * tokens * dims.head_dim, True),
        *_norm_results(run, products, tokens, dims.head_dim, is_read=False),
        _Result("sparse_attention", item * heads, attended),
        _Result("sparse_attention", attended * _FP32 * tokens * dims.num_heads, True),
        _Result("grouped_linear", item * tokens * groups, in_rows and not run.fp8_linears),
        _Result(o_b, item * tokens * dims.hidden_size + run.padding(dims.hidden_size), True),
        *_columns(run, o_b, groups),
    ]
    if AttentionOp.ROPE in kernels:
        # Of a window alone keys are what attention reads.
        is_read = spec.role is Role.SWA and not _through_cache(run)
        results.append(_Result("rotate", item * tokens * dims.head_dim, is_read))
    if spec.layer in dims.engram_layers:
        results += _engram_results(run)
    if AttentionOp.INDEXER in kernels and spec.role in (Role.FULL, Role.REINDEX, Role.CSA):
        results.append(_Result("index_select", _INT32 * tokens * dims.index_topk, False))
        if spec.layer == dims.candidate_source:
            blocks = num_candidate_blocks(dims, _num_entries(run, spec))
            results.append(_Result("index_select", _BOOL * tokens * blocks, False, "candidates"))
    more = _v4_results if is_v4 else _v41_results
    return results + more(run, spec, products)


def _reads_latent(run: _Run, spec: UnitSpec) -> bool:
    """Whether a product in the compute dtype reads the query's latent and learns."""
    scores = spec.role in (Role.FULL, Role.REINDEX, Role.CSA)
    return not run.fp8_linears or (run.dims.indexer_learns and scores)


def _through_cache(run: _Run) -> bool:
    """Whether keys are rounded as a cache would: what is read is a copy then."""
    return run.dims.quantize_cache and run.dims.family == "v41"


def _engram_results(run: _Run) -> list[_Result]:
    """Rows, their projection; from the gate's kernel the streams and three numbers a stream."""
    dims, tokens, item = run.dims, run.tokens, run.item
    columns = (dims.engram_max_order - 1) * dims.engram_heads
    keys_and_value = tokens * (dims.num_streams + 1) * dims.hidden_size
    as_it_is = not run.is_low or run.engram == "triton"
    results = [
        _Result("engram_rows", item * tokens * columns * dims.engram_head_dim, True),
        _Result("engram_linear", item * keys_and_value, as_it_is),
    ]
    if run.engram == "triton":
        gated = item * run.streams + _FP32 * 3 * tokens * dims.num_streams
        results.append(_Result("gate_engram", gated, True))
    return results


def _v41_results(run: _Run, spec: UnitSpec, products: Products) -> list[_Result]:
    """V4.1's compressor and indexer."""
    assert spec.layer is not None
    dims, ratio = run.dims, run.dims.compress_ratios[spec.layer]
    results = list[_Result]()
    if spec.role is Role.FULL:
        latent, learns = run.tokens * dims.head_dim, dims.indexer_learns
        of_values = products.op("attention.compressor.value")
        if ratio == 1:
            results.append(_Result(of_values, run.item * latent, True))
        else:
            results += 2 * [_Result(of_values, _FP32 * latent, False)]
        entries, width = run.batch * (run.seq_len // ratio), dims.index_head_dim
        of_keys = run.item * entries * width
        results += [
            *_norm_results(run, products, entries, dims.head_dim, is_read=learns),
            _Result(products.op("attention.indexer.key"), of_keys, learns),
            *_norm_results(run, products, entries, width, is_read=False, learns=learns),
        ]
        if AttentionOp.ROPE in products.kernels:
            goes_out = not _through_cache(run)
            keys = "trained_index_keys" if learns else "index_keys"
            results += [
                _Result("rotate", run.item * entries * dims.head_dim, False, "kv" * goes_out),
                _Result("rotate", of_keys, False, keys * goes_out),
            ]
    if spec.role in (Role.FULL, Role.REINDEX):
        results += _index_queries(run, products)
    return results


def _v4_results(run: _Run, spec: UnitSpec, products: Products) -> list[_Result]:
    """V4's compressors, the layer's and the indexer's, each with values and gates; its queries are
    turned on their own."""
    assert spec.layer is not None
    dims, ratio = run.dims, run.dims.compress_ratios[spec.layer]
    turns = AttentionOp.ROPE in products.kernels
    heads = run.tokens * dims.num_heads * dims.head_dim
    results = [_Result("rotate", run.item * heads, True)] * turns
    if spec.role is Role.SWA:
        return results
    overlaps = 2 if spec.role is Role.CSA else 1
    # A sequence shorter than one group makes nothing.
    entries = run.batch * (run.seq_len // ratio)
    op, learns = products.op("attention.compressor.value"), dims.indexer_learns
    compressors = [(dims.head_dim, True)]
    if spec.role is Role.CSA:
        compressors.append((dims.index_head_dim, learns))
    for width, has_grad in compressors if entries else ():
        results += 2 * [_Result(op, _FP32 * run.tokens * width * overlaps, False)]
        results += _norm_results(run, products, entries, width, is_read=False, learns=has_grad)
        results += [_Result("rotate", run.item * entries * width, False)] * turns
    return results + (_index_queries(run, products) if spec.role is Role.CSA else [])


def _index_queries(run: _Run, products: Products) -> list[_Result]:
    """The indexer's queries and head weights."""
    dims = run.dims
    queries, weights = dims.index_heads * dims.index_head_dim, dims.index_heads
    return [
        _Result(products.op("attention.indexer.query"), run.item * run.tokens * queries, False),
        _Result(
            products.op("attention.indexer.head_weights"), run.item * run.tokens * weights, False
        ),
    ]


def _head(run: _Run, kernel: str) -> int:
    """V4's collapse coefficients; collapse, norm, its output; of the loss log-probabilities and
    total weight, or in chunks a log-sum-exp a token, or the logits' gradient."""
    dims, tokens = run.dims, run.tokens
    total = _norm(run, tokens, dims.hidden_size)
    if dims.residual_type == "mhc":  # else the norm reads the carry's stream
        total += run.item * tokens * dims.hidden_size
    total += {
        "reference": _FP32 * (tokens * dims.vocab_size + 1),
        "chunked": _FP32 * tokens,
        "triton": run.item * tokens * dims.vocab_size,
    }[kernel]
    if dims.family == "v4" and dims.residual_type == "mhc":
        # streams, 1 / rms; projection, normalised, sigmoid, mix
        total += run.copy(run.streams) + _FP32 * tokens * (1 + 4 * dims.num_streams)
    return total
