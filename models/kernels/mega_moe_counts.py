# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
# (kernels are typed by Triton, at launch)
"""Counts of rows between the ranks of an expert group, and each rank's pool planned from them, all
on the device: nothing waits for the host.

    tell    a rank's numbers into every peer's arena, before a meeting
    plan    what all told, after it: `mega_moe_plan.PoolPlan.packed` in a pool of a given size

A rank tells its rows for each of all E experts, its error word, and how many pool rows it has room
for. So every rank reads from the same numbers whether every pool takes what comes to it. If one
does not, or this rank has given up a wait, the plan is that of no rows: a block of padding, which
all kernels pass through without reading or writing a peer's memory.

Order of memory: `tell` stores plainly, over the link, and ends; the `mega_moe.meet` behind it on
the stream releases to all devices, the peers' `meet` acquires, and their `plan` begins when that
has ended. A rank tells again only after the layer's second meeting, which every peer comes to
behind its `plan`: so nothing is written over before it is read. One that gave up that meeting goes
on without the peer, so from then on it tells its error word alone: a late peer's plan is of numbers
that belong together, and stays inside its pool, until it hears of the error.

Shape letters: P ranks, E experts, L experts here, B = R/128 blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ppruntime.models.kernels.mega_moe import Peers
from ppruntime.models.mega_moe_rules import told_words

_BLOCKS = 128
"""Blocks of the pool whose experts one program finds."""


class Heard(NamedTuple):
    """What came of the numbers that all ranks told."""

    packed: Tensor
    """int32, see `mega_moe_plan.unpacked`; -1 for the expert of a block beyond the last row."""
    words: Tensor
    """int32 [P told_words(E) + 1]: what each told, then the error word that this plan saw; a copy
    of its own, for the host."""


@triton.jit(do_not_specialize=["room"])
def _tell(
    bases_ptr, told_offset, count_ptr, error_ptr, room, rank, num_experts, LANES: tl.constexpr
):  # fmt: skip
    lanes = tl.arange(0, LANES)
    error = tl.load(error_ptr)
    count = tl.load(count_ptr + lanes, mask=lanes < num_experts, other=0)
    count = tl.where(lanes == num_experts, error, count)
    count = tl.where(lanes == num_experts + 1, room, count)
    is_told = tl.where(error == 0, lanes < num_experts + 2, lanes == num_experts)
    address = tl.load(bases_ptr + tl.program_id(0)) + told_offset
    row = address.to(tl.pointer_type(tl.int32)) + rank * (num_experts + 2)
    tl.store(row + lanes, count, mask=is_told)


def tell(peers: Peers, count_E: Tensor, room: int, *, told_offset: int) -> None:
    """Writes this rank's row of int32 [P, told_words(E)], `told_offset` bytes into every arena; of
    a rank that gave up a wait the error word alone."""
    lanes = triton.next_power_of_2(told_words(len(count_E)))
    _tell[(peers.num_ranks,)](
        peers.bases_P, told_offset, count_E, peers.error, room, peers.rank, len(count_E), lanes,
        num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_blocks"])
def _plan(
    told_ptr, error_ptr, words_ptr, start_ptr, count_ptr, before_ptr, place_ptr, expert_ptr,
    num_blocks, num_experts, num_here, rank,
    RANKS: tl.constexpr, LANES: tl.constexpr, HERE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, LANES)
    here = tl.arange(0, HERE)
    is_here = here < num_here
    width = num_experts + 2
    is_expert = lanes < num_experts
    total = tl.zeros([LANES], tl.int32)
    for peer in tl.static_range(RANKS):
        total += tl.load(told_ptr + peer * width + lanes, mask=is_expert, other=0)
    # Every rank comes to the same answer here: it is made of nothing but what all have been told.
    blocks = (total + 127) // 128
    error = tl.load(error_ptr)
    num_late = (error != 0).to(tl.int32)
    for peer in tl.static_range(RANKS):
        theirs = tl.sum(tl.where(lanes // num_here == peer, blocks, 0), axis=0)
        room = tl.load(told_ptr + peer * width + num_experts + 1)
        num_late += (tl.maximum(theirs, 1) * 128 > room).to(tl.int32)
    goes = num_late == 0
    count = tl.zeros([HERE], tl.int32)
    for peer in tl.static_range(RANKS):
        row = told_ptr + peer * width
        if tl.program_id(0) == 0:
            words = tl.load(row + lanes, mask=lanes < width, other=0)
            tl.store(words_ptr + peer * width + lanes, words, mask=lanes < width)
            padded = tl.where(is_expert & goes, (words + 127) // 128, 0)
            place = (tl.cumsum(padded, axis=0) - padded) * 128
            own = lanes - rank * num_here
            is_own = (own >= 0) & (own < num_here)
            tl.store(place_ptr + peer * num_here + own, place, mask=is_own)
            tl.store(before_ptr + peer * num_here + here, count, mask=is_here)
        theirs = tl.load(row + rank * num_here + here, mask=is_here, other=0)
        count += tl.where(goes, theirs, 0)
    blocks = (count + 127) // 128
    # No rows at all: a block of padding, as `make_plan` has it.
    none = tl.sum(blocks, axis=0) == 0
    blocks = tl.where(none & (here == 0), 1, blocks)
    last_block = tl.cumsum(blocks, axis=0)
    if tl.program_id(0) == 0:
        tl.store(start_ptr + here, (last_block - blocks) * 128, mask=is_here)
        tl.store(start_ptr + num_here, tl.sum(blocks, axis=0) * 128)
        tl.store(count_ptr + here, count, mask=is_here)
        tl.store(words_ptr + RANKS * width, error)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    passed = (last_block[None, :] <= block[:, None]) & is_here[None, :]
    expert = tl.sum(passed.to(tl.int32), axis=1)
    expert = tl.where(expert < num_here, expert, -1)
    tl.store(expert_ptr + block, expert, mask=block < num_blocks)


def plan(peers: Peers, told: Tensor, num_experts: int, num_rows: int) -> Heard:
    """The plan of this rank's pool of `num_rows` rows from what lies in its own arena, `told`."""
    num_ranks, blocks = peers.num_ranks, num_rows // 128
    here, width = num_experts // num_ranks, told_words(num_experts)
    sizes = [here + 1, here, num_ranks * here, num_ranks * here, blocks]
    packed, words = told.new_empty(sum(sizes)), told.new_empty(num_ranks * width + 1)
    _plan[(triton.cdiv(blocks, _BLOCKS),)](
        told, peers.error, words, *torch.split(packed, sizes),
        blocks, num_experts, here, peers.rank, num_ranks, triton.next_power_of_2(width),
        max(2, triton.next_power_of_2(here)), _BLOCKS, num_warps=4,
    )  # fmt: skip
    return Heard(packed, words)
