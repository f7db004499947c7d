# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""The local layout of routed rows: one gather into a pool grouped by expert, one gather-sum back.

Each expert's rows start at a multiple of 128 of the pool, in token order, so that every 128-row
block belongs to one expert and the layout, like everything computed in it, has the same bits in
every run. Nothing waits for the host: the pool has the size of the worst case, and blocks that no
expert needs are skipped. Both directions gather, in the backward too; nothing is scattered.

Under expert parallelism the pairs come from other ranks: `pair_P` then indexes the rows received.

Shape letters: N tokens, K experts per token, E experts, P pool rows, B = P/128 blocks, C channels,
G = C/128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.fp8_expert_rules import most_rows as most_rows
from ppruntime.models.kernels.rounding import to_bf16

BLOCK = 128
"""Pool rows that belong to one expert together."""
_PAIRS = 1024
"""Token-expert pairs that one program of the layout kernels places."""


class Layout(NamedTuple):
    """Where the token-expert pairs lie in the pool."""

    pair_P: Tensor
    """int32: n K + k of the row's pair; -1 where the row is padding."""
    row_NK: Tensor
    """int32: row of each pair; -1 where the pair is routed nowhere (expert -1)."""
    expert_B: Tensor
    """int32: expert of each 128-row block; -1 where none."""
    start_E1: Tensor
    """int32 [E + 1]: first row of each expert, then the end of the last."""
    count_E: Tensor
    """int32: rows of each expert, padding not counted."""

    @property
    def num_rows(self) -> int:
        """P, padding and unneeded blocks included."""
        return self.pair_P.shape[0]

    @property
    def experts_per_token(self) -> int:
        return self.row_NK.shape[1]


def padded_rows(counts: Sequence[int]) -> int:
    """Pool rows for so many rows of each expert."""
    return sum(-(-count // BLOCK) for count in counts) * BLOCK


def expert_layout_reference(
    experts_NK: Tensor, num_experts: int, num_rows: int | None = None
) -> Layout:
    """The layout by a stable sort. Experts of -1 are routed nowhere. `num_rows`: pool rows, where
    the host knows how many the routing takes; None: for the worst case."""
    num_tokens, per_token = experts_NK.shape
    if num_rows is None:
        num_rows = most_rows(num_tokens * per_token, num_experts)
    expert_of_pair = experts_NK.flatten().long()
    order = expert_of_pair.argsort(stable=True)
    order = order[expert_of_pair[order] >= 0]
    expert_of_place = expert_of_pair[order]
    count_E = torch.bincount(expert_of_place, minlength=num_experts)
    blocks_E = (count_E + BLOCK - 1) // BLOCK
    start_E1 = torch.cat([blocks_E.new_zeros(1), blocks_E.cumsum(0)]) * BLOCK
    first_place_E = count_E.cumsum(0) - count_E
    places = torch.arange(len(order), device=order.device)
    row_of_place = start_E1[expert_of_place] + places - first_place_E[expert_of_place]
    pair_P = order.new_full((num_rows,), -1)
    pair_P[row_of_place] = order
    row_NK = order.new_full((num_tokens * per_token,), -1)
    row_NK[order] = row_of_place
    first_rows = torch.arange(0, num_rows, BLOCK, device=order.device)
    expert_B = torch.searchsorted(start_E1[1:], first_rows, right=True)
    expert_B = torch.where(first_rows < start_E1[-1], expert_B, -1)
    ints = (pair_P, row_NK.view_as(experts_NK), expert_B, start_E1, count_E)
    return Layout(*(t.to(torch.int32) for t in ints))


@triton.jit
def _count_pairs(expert_ptr, count_ptr, num_pairs, BINS: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs of each expert among the 1,024 pairs of one program: count[program, expert]."""
    part = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for i in range(PAIRS // 128):
        pairs = part * PAIRS + i * 128 + tl.arange(0, 128)
        expert = tl.load(expert_ptr + pairs, mask=pairs < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(expert, 0), BINS, mask=expert >= 0)
    tl.store(count_ptr + part * BINS + bins, counts)


@triton.jit
def _plan(
    count_ptr, start_ptr, total_ptr, expert_ptr, num_parts, num_blocks, num_experts,
    BINS: tl.constexpr,
):  # fmt: skip
    """One program: turns the counts of parts into the first row of each (part, expert), and
    writes starts, totals and the experts of blocks."""
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, num_parts, 16):
        parts = first + tl.arange(0, 16)
        offsets = parts[:, None] * BINS + bins[None, :]
        counts = tl.load(count_ptr + offsets, mask=(parts < num_parts)[:, None], other=0)
        total += tl.sum(counts, axis=0)
    blocks = (total + 127) // 128
    last_block = tl.cumsum(blocks, axis=0)
    start = (last_block - blocks) * 128
    is_expert = bins < num_experts
    tl.store(total_ptr + bins, total, mask=is_expert)
    tl.store(start_ptr + bins, start, mask=is_expert)
    tl.store(start_ptr + num_experts, tl.sum(blocks, axis=0) * 128)
    next_row = start
    for first in range(0, num_parts, 16):
        parts = first + tl.arange(0, 16)
        offsets = parts[:, None] * BINS + bins[None, :]
        inside = (parts < num_parts)[:, None]
        counts = tl.load(count_ptr + offsets, mask=inside, other=0)
        before = tl.cumsum(counts, axis=0) - counts
        tl.store(count_ptr + offsets, before + next_row[None, :], mask=inside)
        next_row += tl.sum(counts, axis=0)
    for first in range(0, num_blocks, 16):
        block = first + tl.arange(0, 16)
        passed = (last_block[None, :] <= block[:, None]) & is_expert[None, :]
        expert = tl.sum(passed.to(tl.int32), axis=1)
        expert = tl.where(expert < num_experts, expert, -1)
        tl.store(expert_ptr + block, expert, mask=block < num_blocks)


@triton.jit
def _place_pairs(
    expert_ptr, first_row_ptr, pair_ptr, row_ptr, num_pairs,
    BINS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Gives each of 1,024 pairs its row, in order."""
    part = tl.program_id(0)
    places = tl.arange(0, 128)
    for i in range(PAIRS // 128):
        pairs = part * PAIRS + i * 128 + places
        inside = pairs < num_pairs
        expert = tl.load(expert_ptr + pairs, mask=inside, other=-1)
        # Earlier pairs of this program with the same expert: of the same 128 by comparison, of the
        # 128s before by the table, which each round moves on.
        same = expert[:, None] == expert[None, :]
        earlier = tl.sum((same & (places[None, :] < places[:, None])).to(tl.int32), axis=1)
        later = tl.sum((same & (places[None, :] > places[:, None])).to(tl.int32), axis=1)
        routed = expert >= 0
        next_row = first_row_ptr + part * BINS + tl.maximum(expert, 0)
        row = tl.load(next_row, mask=routed, other=0) + earlier
        tl.store(pair_ptr + row, pairs, mask=routed)
        tl.store(row_ptr + pairs, tl.where(routed, row, -1), mask=inside)
        tl.debug_barrier()  # all have read the table
        tl.store(next_row, row + 1, mask=routed & (later == 0))
        tl.debug_barrier()  # all see it


def expert_layout(experts_NK: Tensor, num_experts: int, num_rows: int | None = None) -> Layout:
    """`expert_layout_reference` without a sort: count, plan, place. Never waits for the device."""
    num_tokens, per_token = experts_NK.shape
    num_pairs = num_tokens * per_token
    if num_rows is None:
        num_rows = most_rows(num_pairs, num_experts)
    num_parts, bins = triton.cdiv(num_pairs, _PAIRS), max(16, triton.next_power_of_2(num_experts))
    experts = experts_NK.to(torch.int32).contiguous()
    layout = Layout(
        torch.full((num_rows,), -1, dtype=torch.int32, device=experts.device),
        torch.empty_like(experts),
        experts.new_empty(num_rows // BLOCK),
        experts.new_empty(num_experts + 1),
        experts.new_empty(num_experts),
    )
    table = experts.new_empty(num_parts, bins)
    if num_parts:
        _count_pairs[(num_parts,)](experts, table, num_pairs, bins, _PAIRS, num_warps=4)
    _plan[(1,)](
        table, layout.start_E1, layout.count_E, layout.expert_B,
        num_parts, num_rows // BLOCK, num_experts, bins, num_warps=8,
    )  # fmt: skip
    if num_parts:
        _place_pairs[(num_parts,)](
            experts, table, layout.pair_P, layout.row_NK, num_pairs, bins, _PAIRS, num_warps=8
        )
    return layout


# Into the pool.


def gather_rows_reference(x_NC: Tensor, layout: Layout) -> Tensor:
    """x[token of each pool row], [P, C]; zeros in padding."""
    token_P = layout.pair_P.long().clamp_min(0) // layout.experts_per_token
    # A copy by bytes: torch can neither multiply nor select FP8.
    return torch.where((layout.pair_P >= 0).unsqueeze(1), x_NC.float()[token_P], 0).to(x_NC.dtype)


@triton.jit
def _gather_rows(
    x_ptr, x_scale_ptr, pair_ptr, expert_ptr, y_ptr, y_scale_ptr, P, C: tl.constexpr,
    PAIRS_PER_TOKEN: tl.constexpr, WITH_SCALE: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.load(expert_ptr + tl.program_id(0) * ROWS // 128) < 0:
        return
    pair = tl.load(pair_ptr + rows)
    routed = (pair >= 0)[:, None]
    token = (pair // PAIRS_PER_TOKEN).to(tl.int64)
    for first in range(0, C, CHANNELS):
        channels = first + tl.arange(0, CHANNELS)[None, :]
        inside = channels < C
        x = tl.load(x_ptr + token[:, None] * C + channels, mask=routed & inside, other=0)
        tl.store(y_ptr + rows.to(tl.int64)[:, None] * C + channels, x, mask=inside)
    if WITH_SCALE:
        groups = tl.arange(0, GROUPS)[None, :]
        inside = groups < C // 128
        scale = tl.load(
            x_scale_ptr + token[:, None] * (C // 128) + groups, mask=routed & inside, other=0.0
        )
        tl.store(y_scale_ptr + groups * P + rows[:, None], scale, mask=inside)


def gather_rows(x_NC: Tensor, layout: Layout, scale_NG: Tensor | None = None) -> tuple[Tensor, ...]:
    """x of each pool row: [P, C], zeros in padding; blocks without an expert are not written.

    x may be bf16, fp32 or FP8. With `scale_NG`, row scales come along, as [G, P].
    """
    channels, num_rows = x_NC.shape[1], layout.num_rows
    y_PC = x_NC.new_empty(num_rows, channels)
    scale_GP = None if scale_NG is None else scale_NG.new_empty(scale_NG.shape[1], num_rows)
    if num_rows:
        as_bytes = x_NC.element_size() == 1
        _gather_rows[(num_rows // 16,)](
            x_NC.contiguous().view(torch.uint8) if as_bytes else x_NC.contiguous(), scale_NG,
            layout.pair_P, layout.expert_B, y_PC.view(torch.uint8) if as_bytes else y_PC, scale_GP,
            num_rows, channels, layout.experts_per_token, scale_NG is not None,
            16, 1024, triton.next_power_of_2(triton.cdiv(channels, 128)), num_warps=8,
        )  # fmt: skip
    return (y_PC,) if scale_GP is None else (y_PC, scale_GP)


# Back to the tokens.


def gather_sum_reference(
    y_PC: Tensor, layout: Layout, weights_NK: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """sum_k weight_nk y[row of (n, k)], [N, C]: summed in fp32, k ascending."""
    total = y_PC.new_zeros(layout.row_NK.shape[0], y_PC.shape[1], dtype=torch.float32)
    for k in range(layout.experts_per_token):
        row_N1 = layout.row_NK[:, k : k + 1]
        y_NC = y_PC[row_N1.flatten().long().clamp_min(0)].float()
        if weights_NK is not None:
            y_NC = y_NC * weights_NK[:, k : k + 1]
        total += torch.where(row_N1 >= 0, y_NC, 0)
    return total.to(dtype)


@triton.jit
def _gather_sum(
    y_ptr, weight_ptr, row_ptr, out_ptr, N, C: tl.constexpr, K: tl.constexpr,
    WEIGHTED: tl.constexpr, TO_BF16: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    is_token, inside = tokens < N, channels < C
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + tokens * K + k, mask=is_token, other=-1)
        offsets = row.to(tl.int64)[:, None] * C + channels
        y = tl.load(y_ptr + offsets, mask=(row >= 0)[:, None] & inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            y *= tl.load(weight_ptr + tokens * K + k, mask=is_token, other=0.0)[:, None]
        total += y
    if TO_BF16:
        total = to_bf16(total)
    offsets = tokens.to(tl.int64)[:, None] * C + channels
    tl.store(out_ptr + offsets, total, mask=is_token[:, None] & inside)


def gather_sum(
    y_PC: Tensor, layout: Layout, weights_NK: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """`gather_sum_reference` in one pass; `dtype` is torch.bfloat16 or torch.float32."""
    num_tokens, per_token = layout.row_NK.shape
    channels = y_PC.shape[1]
    out_NC = y_PC.new_empty(num_tokens, channels, dtype=dtype)
    if num_tokens:
        _gather_sum[(triton.cdiv(num_tokens, 4), triton.cdiv(channels, 1024))](
            y_PC, weights_NK, layout.row_NK, out_NC, num_tokens, channels, per_token,
            weights_NK is not None, dtype is torch.bfloat16, 4, 1024, num_warps=8,
        )  # fmt: skip
    return out_NC
