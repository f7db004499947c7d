# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""Rows between the ranks of an expert group by loads and stores of each other's memory.

    meet          all ranks have come this far, and see what the others wrote before
    find_rows     which pair of which rank each pool row is, and its routing weight
    pull_rows     the rows into the pool, in order; a block's flag counts its parts that are there
    push_values   one number per pool row back to its pair

Memory of others is reached through its address: `bases_P` holds, by rank, where this process has
that rank's arena mapped, and a region of an arena begins so many bytes behind. What is read from a
peer was written before a `meet`, so the only words that are polled are `meet`'s and the flags, each
in memory of this GPU. Every wait has a limit: who reaches it writes the error word and goes on with
whatever is there, and whoever finds the word written waits no more. Nothing hangs or traps.

A home is where a row came from: source rank times the most pairs of a rank, plus the pair; -1 in
padding. Shape letters: P ranks, R pool rows, B = R/128, L experts here, C channels, G = C/128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from ppruntime.models.kernels.moe_layout import BLOCK
from ppruntime.models.kernels.quantize import GROUP, Quantized, group_scale
from ppruntime.models.kernels.rounding import INTERPRETED, reciprocal, to_e4m3

PART_ROWS = 32
"""Rows that one program pulls at once."""
PARTS = BLOCK // PART_ROWS
"""A block's flag when all of it is there."""
_WORDS = 256
"""32-bit words of each row on the way at once: with the rows, 32 KB, as NVLink's latency asks."""
_GROUPS = 4
"""Groups of 128 bf16 values of each row, likewise."""
LATE_PART = 1 << 16
"""Error word: a product waited too long for a block; below it, 1 + the rank that did not meet."""


class Peers(NamedTuple):
    """The arenas of a group as one rank sees them."""

    bases_P: Tensor
    """int64: their addresses here, by rank."""
    error: Tensor
    """int32 [1]: 0 until a wait of this rank took too long; not reset."""
    rank: int
    limit: int
    """Longest wait: nanoseconds; in the interpreter, polls."""

    @property
    def num_ranks(self) -> int:
        return len(self.bases_P)


class FoundRows(NamedTuple):
    """What a pool row is."""

    home_R: Tensor
    """int32."""
    pair_R: Tensor
    """int32: the row itself; -1 in padding. The pool's rows as `moe_layout.Layout` has them."""
    weight_R: Tensor
    """fp32 routing weight; 0 in padding."""


@triton.jit
def wait_until(word_ptr, wanted, error_ptr, code, limit, SCOPE: tl.constexpr):
    """Until the word has reached `wanted`, less than 2^31 away; then what was written before it was
    is visible. After `limit` writes `code` to the error word."""
    seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope=SCOPE)
    if wanted - seen > 0:
        begin = _now(0)
        polls = 0
        failed = tl.atomic_add(error_ptr, 0, sem="relaxed", scope="gpu")
        waited = begin - begin
        while (wanted - seen > 0) & (failed == 0) & (waited < limit):
            seen = tl.atomic_add(word_ptr, 0, sem="acquire", scope=SCOPE)
            failed = tl.atomic_add(error_ptr, 0, sem="relaxed", scope="gpu")
            polls += 1
            waited = _now(polls) - begin
        if wanted - seen > 0:
            tl.atomic_cas(error_ptr, 0, code, sem="relaxed", scope="gpu")  # the first one stays


@triton.jit
def _now(polls):
    """Nanoseconds; in the interpreter, polls."""
    return polls if INTERPRETED else cuda.globaltimer()


@triton.jit
def proxy_fence():
    """Between ordinary stores and TMA loads of one memory, on both sides of a flag: the two take
    different paths, which a release and an acquire alone do not order."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# Numbers that change from call to call are not specialised on: a variant that is first needed in
# the middle of a step would be loaded there, for which CUDA may wait for all that runs.


@triton.jit(do_not_specialize=["epoch"])
def _meet(
    bases_ptr, error_ptr, words_offset, epoch, limit, rank,
    RANKS: tl.constexpr, ARRIVE: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    if ARRIVE:
        for peer in tl.static_range(RANKS):
            address = tl.load(bases_ptr + peer) + words_offset + 4 * rank
            word_ptr = address.to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(word_ptr, epoch, sem="release", scope="sys")
    if WAIT:
        own = tl.load(bases_ptr + rank) + words_offset
        for peer in tl.static_range(RANKS):
            word_ptr = (own + 4 * peer).to(tl.pointer_type(tl.int32))
            wait_until(word_ptr, epoch, error_ptr, peer + 1, limit, "sys")


def meet(
    peers: Peers, words_offset: int, epoch: int, *, arrive: bool = True, wait: bool = True
) -> None:
    """Tells every rank that this one has come to `epoch`, and waits for theirs. Epochs only grow; a
    word has their last 32 bits.

    One word per rank in every arena, `words_offset` bytes in. Ranks that one process plays arrive
    first, all of them, and wait after that.
    """
    _meet[(1,)](
        peers.bases_P, peers.error, words_offset, _as_int32(epoch), peers.limit, peers.rank,
        peers.num_ranks, arrive, wait, num_warps=1,
    )  # fmt: skip


def _as_int32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


@triton.jit
def _find_rows(
    bases_ptr, order_offset, weights_offset, start_ptr, count_ptr, before_ptr, place_ptr,
    expert_ptr, home_ptr, pair_ptr, weight_ptr, L, most_pairs, RANKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    rows = block * 128 + tl.arange(0, 128)
    expert = tl.load(expert_ptr + block)
    if expert < 0:  # beyond the last row
        tl.store(home_ptr + rows, tl.full([128], -1, tl.int32))
        tl.store(pair_ptr + rows, tl.full([128], -1, tl.int32))
        tl.store(weight_ptr + rows, tl.zeros([128], tl.float32))
        return
    within = rows - tl.load(start_ptr + expert)
    live = within < tl.load(count_ptr + expert)
    source = tl.zeros([128], tl.int32)
    for peer in tl.static_range(1, RANKS):
        source += (within >= tl.load(before_ptr + peer * L + expert)).to(tl.int32)
    cell = source * L + expert
    place = tl.load(place_ptr + cell) + within - tl.load(before_ptr + cell)
    base = tl.load(bases_ptr + source)
    order = (base + order_offset).to(tl.pointer_type(tl.int32))
    pair = tl.load(order + place, mask=live, other=0)
    weights = (base + weights_offset).to(tl.pointer_type(tl.float32))
    weight = tl.load(weights + pair, mask=live, other=0.0)
    tl.store(home_ptr + rows, tl.where(live, source * most_pairs + pair, -1))
    tl.store(pair_ptr + rows, tl.where(live, rows, -1))
    tl.store(weight_ptr + rows, weight)


def find_rows(
    peers: Peers,
    plan: tuple[Tensor, ...],
    *,
    order_offset: int,
    weights_offset: int,
    most_pairs: int,
) -> FoundRows:
    """Reads the peers' lists of pairs. `plan` as `mega_moe_plan.unpacked` gives it; blocks beyond
    the last row have expert -1 and are padding."""
    start_L1, count_L, before, place, expert_B = plan
    rows = len(expert_B) * BLOCK
    found = FoundRows(
        expert_B.new_empty(rows),
        expert_B.new_empty(rows),
        expert_B.new_empty(rows, dtype=torch.float32),
    )
    if rows:
        _find_rows[(len(expert_B),)](
            peers.bases_P, order_offset, weights_offset, start_L1, count_L, before, place,
            expert_B, *found, len(count_L), most_pairs, peers.num_ranks, num_warps=4,
        )  # fmt: skip
    return found


def find_rows_reference(
    orders: list[Tensor], weights: list[Tensor], plan: tuple[Tensor, ...], *, most_pairs: int
) -> FoundRows:
    """The same from the peers' tensors: lists of pairs, and weights by pair."""
    start_L1, count_L, before, place, expert_B = (part.long() for part in plan)
    before_PL, place_PL = before.view(len(orders), -1), place.view(len(orders), -1)
    rows = len(expert_B) * BLOCK
    home_R = torch.full((rows,), -1, dtype=torch.int32)
    weight_R = torch.zeros(rows)
    for expert, (start, count) in enumerate(zip(start_L1, count_L, strict=False)):
        for within in range(int(count)):
            source = int((before_PL[:, expert] <= within).sum()) - 1
            place_there = place_PL[source, expert] + within - before_PL[source, expert]
            pair = orders[source][place_there]
            home_R[start + within] = source * most_pairs + pair
            weight_R[start + within] = weights[source].flatten()[pair]
    pair_R = torch.where(home_R >= 0, torch.arange(rows), -1).to(torch.int32)
    return FoundRows(home_R, pair_R, weight_R)


@triton.jit
def _pull_rows(
    bases_ptr, rows_offset, scales_offset, home_ptr, flag_ptr, out_ptr, scale_ptr, scale_by_row_ptr,
    start_ptr, L, R, most_pairs, WORDS: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, WITH_SCALES: tl.constexpr,
    GROUPS_2: tl.constexpr,
):  # fmt: skip
    num_parts = tl.load(start_ptr + L) // ROWS
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        rows = part * ROWS + tl.arange(0, ROWS)
        home = tl.load(home_ptr + rows)
        live = home >= 0
        home = tl.maximum(home, 0)
        token = (home % most_pairs // PAIRS_PER_TOKEN).to(tl.int64)
        base = tl.load(bases_ptr + home // most_pairs)
        source = (base + rows_offset + token * (4 * WORDS)).to(tl.pointer_type(tl.int32))
        source = tl.multiple_of(source, [16])
        target = out_ptr + rows.to(tl.int64) * WORDS
        for first in range(0, WORDS, CHUNK):
            words = first + tl.arange(0, CHUNK)[None, :]
            inside = words < WORDS
            row = tl.load(source[:, None] + words, mask=live[:, None] & inside, other=0)
            tl.store(target[:, None] + words, row, mask=inside)
        if WITH_SCALES:
            groups = tl.arange(0, GROUPS_2)[None, :]
            inside = groups < GROUPS
            scales = (base + scales_offset + token * (4 * GROUPS)).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales[:, None] + groups, mask=live[:, None] & inside, other=0.0)
            tl.store(scale_by_row_ptr + rows[:, None] * GROUPS + groups, scale, mask=inside)
            tl.store(scale_ptr + groups * R + rows[:, None], scale, mask=inside)
        proxy_fence()
        tl.debug_barrier()
        tl.atomic_add(flag_ptr + part * ROWS // 128, 1, sem="release", scope="gpu")


@triton.jit
def _pull_and_quantize(
    bases_ptr, rows_offset, home_ptr, flag_ptr, out_ptr, data_ptr, scale_ptr,
    start_ptr, L, R, most_pairs, C: tl.constexpr, PAIRS_PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    num_parts = tl.load(start_ptr + L) // ROWS
    for part in range(tl.program_id(0), num_parts, tl.num_programs(0)):
        rows = part * ROWS + tl.arange(0, ROWS)
        home = tl.load(home_ptr + rows)
        live = home >= 0
        home = tl.maximum(home, 0)
        token = (home % most_pairs // PAIRS_PER_TOKEN).to(tl.int64)
        base = tl.load(bases_ptr + home // most_pairs)
        source = (base + rows_offset + token * (2 * C)).to(tl.pointer_type(tl.bfloat16))
        source = tl.multiple_of(source, [16])
        target = rows.to(tl.int64) * C
        for first in range(0, C // 128, GROUPS):
            channels = first * 128 + tl.arange(0, GROUPS * 128)[None, :]
            inside = channels < C
            x = tl.load(source[:, None] + channels, mask=live[:, None] & inside, other=0.0)
            tl.store(out_ptr + target[:, None] + channels, x, mask=inside)
            wide = tl.reshape(x.to(tl.float32), [ROWS, GROUPS, 128])
            scale = group_scale(tl.max(tl.abs(wide), axis=2), False)
            quantized = to_e4m3(wide * reciprocal(scale)[:, :, None])
            quantized = tl.reshape(quantized, [ROWS, GROUPS * 128])
            tl.store(data_ptr + target[:, None] + channels, quantized, mask=inside)
            groups = first + tl.arange(0, GROUPS)[None, :]
            tl.store(scale_ptr + groups * R + rows[:, None], scale, mask=groups < C // 128)
        proxy_fence()
        tl.debug_barrier()
        tl.atomic_add(flag_ptr + part * ROWS // 128, 1, sem="release", scope="gpu")


class PulledRows(NamedTuple):
    """The pool's rows and how much of each block is there."""

    data_RC: Tensor
    """bf16 or E4M3; zeros in padding."""
    scale_GR: Tensor | None
    """fp32, of E4M3: as products read it."""
    scale_RG: Tensor | None
    """The same by row, as passes that gather rows read it."""
    flag_B: Tensor
    """int32: parts of the block that are there, of `PARTS`."""
    ticket_1: Tensor
    """int32 [1], 0: for a product of these rows, see `mega_moe_gemm.Helpers`."""

    def rows(self) -> Quantized:
        """E4M3 rows, as products read them."""
        assert self.scale_GR is not None
        return Quantized(self.data_RC, self.scale_GR)

    def by_row(self) -> Quantized:
        """E4M3 rows, as quantisers gather them."""
        assert self.scale_RG is not None
        return Quantized(self.data_RC, self.scale_RG)


def empty_pool(home_R: Tensor, channels: int, *, fp8: bool) -> PulledRows:
    """Memory for `pull_rows`, with flags that say that nothing is there."""
    rows = len(home_R)
    data = home_R.new_empty(rows, channels, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    # Flags and ticket by one launch; the ticket has a line of the cache for itself.
    words = torch.zeros(rows // BLOCK + 64, dtype=torch.int32, device=home_R.device)
    flags, ticket = words[64:], words[:1]
    if not fp8:
        return PulledRows(data, None, None, flags, ticket)
    scale = home_R.new_empty(channels // GROUP, rows, dtype=torch.float32)
    return PulledRows(data, scale, scale.new_empty(rows, channels // GROUP), flags, ticket)


def pull_rows(
    peers: Peers,
    home_R: Tensor,
    start_L1: Tensor,
    pool: PulledRows,
    *,
    rows_offset: int,
    scales_offset: int,
    per_token: int,
    most_pairs: int,
    num_sms: int,
    quantized: Quantized | None = None,
) -> None:
    """Copies each row's token from its source, blocks in order, and then raises the block's flag;
    blocks beyond the last expert's end, the last number of `start_L1`, are left alone.

    At the source, tokens lie `rows_offset` bytes in, dense, and their scales [tokens, G] at
    `scales_offset`. `num_sms` programs of it run at once. With `quantized` (data [R, C], scale
    [G, R], see `quantize.pool_rows_like`) bf16 rows are also quantised on the way, as
    `quantize_rows` does it without powers of two; a block's flag then stands for both.
    """
    rows, channels = pool.data_RC.shape
    if not rows:
        return
    num_programs, here = min(rows // PART_ROWS, num_sms), len(start_L1) - 1
    if quantized is not None:
        _pull_and_quantize[(num_programs,)](
            peers.bases_P, rows_offset, home_R, pool.flag_B, pool.data_RC, *quantized,
            start_L1, here, rows, most_pairs, channels, per_token, PART_ROWS, _GROUPS, num_warps=8,
        )  # fmt: skip
        return
    words = channels * pool.data_RC.element_size() // 4
    groups = channels // GROUP
    _pull_rows[(num_programs,)](
        peers.bases_P, rows_offset, scales_offset, home_R, pool.flag_B,
        pool.data_RC.view(torch.int32), pool.scale_GR, pool.scale_RG,
        start_L1, here, rows, most_pairs, words, per_token, groups, PART_ROWS, _WORDS,
        pool.scale_GR is not None, triton.next_power_of_2(groups), num_warps=8,
    )  # fmt: skip


def pull_rows_reference(
    sources: list[Tensor], home_R: Tensor, *, per_token: int, most_pairs: int
) -> Tensor:
    """The rows from the peers' tensors, zeros in padding."""
    rows = [
        sources[home // most_pairs][home % most_pairs // per_token].float()
        if home >= 0
        else torch.zeros(sources[0].shape[1])
        for home in home_R.tolist()
    ]
    empty = sources[0].float().new_empty(0, sources[0].shape[1])
    return (torch.stack(rows) if rows else empty).to(sources[0].dtype)


@triton.jit
def _push_values(
    bases_ptr, offset, home_ptr, value_ptr, most_pairs, num_rows, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    home = tl.load(home_ptr + rows, mask=rows < num_rows, other=-1)
    value = tl.load(value_ptr + rows, mask=rows < num_rows, other=0.0)
    live = home >= 0
    home = tl.maximum(home, 0)
    base = tl.load(bases_ptr + home // most_pairs)
    target = (base + offset).to(tl.pointer_type(tl.float32)) + home % most_pairs
    tl.store(target, value, mask=live)


def push_values(
    peers: Peers, home_R: Tensor, value_R: Tensor, *, offset: int, most_pairs: int
) -> None:
    """Writes each row's fp32 value to its pair's place in the list at `offset` of its source."""
    if len(home_R):
        _push_values[(triton.cdiv(len(home_R), 256),)](
            peers.bases_P, offset, home_R, value_R, most_pairs, len(home_R), 256, num_warps=4
        )


def push_reference(
    targets: list[Tensor], home_R: Tensor, values: Tensor, *, most_pairs: int
) -> None:
    """Writes row r of `values` to row `pair` of the source's tensor [most_pairs, ...]."""
    for row, home in enumerate(home_R.tolist()):
        if home >= 0:
            targets[home // most_pairs][home % most_pairs] = values[row]
