# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Gluon kernel of grouped_gemm.py beside this file, for Hopper: the experts' weight gradient.

Triton's kernel moves 24 KB of operands through the second-level cache for a product of 64 x 128 and
128 rows: 27 GB a micro-batch at V4.1's widths. Larger tiles need fewer bytes, and a tile of
128 x 256 (14 GB) is the largest whose sums fit into registers. It fills a multiprocessor by itself;
so three groups of warps work side by side:

    copy        one warp: TMA copies of the next steps' operands and scales into a ring of stages
    multiply    two warpgroups: one half of the tile's columns each, 128 x 128, as two products of
                64 x 128 a step, so that the product on its way takes 64 registers beside 128 sums

While one warpgroup scales and adds a product, the tensor cores have the other's. `add_products` is
that step, which mega_moe_gemm_hopper.py takes too.

The second-level cache adds a tile's sums to memory: nothing waits for what was there, but a sum
that is subnormal becomes zero. They go there from registers (`red`), whole lines at a time where
the accumulator is not turned, or through shared memory by TMA, which adds them while the
warpgroup is at its next products; `grouped_gemm.adds_by_tma` says which. Either way each place
gets the micro-batches' sums one after the other, and the bits are the same. The copies go on
meanwhile, over the ends of tiles.

Gluon has no interpreter: this runs on a GPU only; tests/simulated_gluon.py runs what it computes,
its warps and TMA's additions in any order that barriers and waits allow.
docs/bench/moe-experts.json has its times.
"""

from __future__ import annotations

import triton.experimental.gluon as gluon
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DATA_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
"""Of both operands in shared memory: 128 contiguous rows of a column are one swizzled line."""
SCALE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))
SUM_LAYOUT = gl.NVMMASharedLayout(128, 32, 2)
"""Of sums in shared memory, for TMA."""
all_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Triton 3.6's and 3.7's name of one thing: the warpgroup's threads wait for each other."""


def descriptor(x: Tensor, box: int) -> TensorDescriptor:
    """Of FP8 values, columns as [blocks x width, 128] or rows, or of scales, flat: a copy takes
    `box` of the first, and 128 values of each."""
    if x.dim() == 1:
        return TensorDescriptor.from_tensor(x, [box], SCALE_LAYOUT.value)
    return TensorDescriptor.from_tensor(x, [box, 128], DATA_LAYOUT)


def sums_descriptor(accumulator_EAC: Tensor, columns: int, turned: bool) -> TensorDescriptor:
    """Of the accumulator, one expert's rows after the other's: TMA adds boxes of what a warpgroup
    has of a product, 64 rows by half of a tile's `columns`, or if turned the other way round."""
    box = [columns // 2, 64] if turned else [64, columns // 2]
    flat = accumulator_EAC.view(-1, accumulator_EAC.shape[2])
    return TensorDescriptor.from_tensor(flat, box, SUM_LAYOUT)


@gluon.jit
def _place(
    tile, A: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """(expert, first row, first column) of a tile: `GROUP` row blocks, which divide all, go through
    all columns before the next ones, so that tiles in flight share operands."""
    NUM_COLUMNS: gl.constexpr = C // COLUMNS
    TILES: gl.constexpr = A // ROWS * NUM_COLUMNS
    within = tile % TILES
    of_group = within % (GROUP * NUM_COLUMNS)
    row_block = within // (GROUP * NUM_COLUMNS) * GROUP + of_group % GROUP
    return tile // TILES, row_block * ROWS, of_group // GROUP * COLUMNS


@gluon.jit
def _accumulator(
    acc_ptr, expert, row, column, A: gl.constexpr, C: gl.constexpr, TURNED: gl.constexpr
):
    """Pointer to a tile's first element; [A, C] per expert, or [C, A] if turned."""
    if TURNED:
        place = acc_ptr + expert.to(gl.int64) * (A * C) + (column * A + row)
    else:
        place = acc_ptr + expert.to(gl.int64) * (A * C) + (row * C + column)
    return place


@gluon.jit
def _copy(
    operands, starts, shared, ready, free, num_tiles,
    A: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, NUM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills stage after stage, each when both warpgroups have done with what it held."""
    left_shared, right_shared, left_scales, right_scales = shared
    SCALES: gl.constexpr = (0 if LEFT_TILES else ROWS) + (0 if RIGHT_TILES else COLUMNS)
    BYTES: gl.constexpr = (ROWS + COLUMNS) * 128 + SCALES * 4
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, column = _place(tile, A, C, ROWS, COLUMNS, GROUP)
        for i in gl.static_range(NUM):
            left, right = operands[4 * i], operands[4 * i + 1]
            left_scale, right_scale = operands[4 * i + 2], operands[4 * i + 3]
            first_block = gl.load(starts[i] + expert) // 128
            stop_block = gl.load(starts[i] + expert + 1) // 128
            for block in range(first_block, stop_block):
                stage = step % STAGES
                # A new barrier counts as past its phase 1: the first round waits for nothing.
                mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
                full = ready.index(stage)
                mbarrier.expect(full, BYTES)
                a = block * A + row
                tma.async_copy_global_to_shared(left, [a, 0], full, left_shared.index(2 * stage))
                tma.async_copy_global_to_shared(
                    left, [a + 64, 0], full, left_shared.index(2 * stage + 1)
                )
                c = block * C + column
                tma.async_copy_global_to_shared(right, [c, 0], full, right_shared.index(stage))
                if not LEFT_TILES:
                    tma.async_copy_global_to_shared(
                        left_scale, [a], full, left_scales.index(2 * stage)
                    )
                    tma.async_copy_global_to_shared(
                        left_scale, [a + 64], full, left_scales.index(2 * stage + 1)
                    )
                if not RIGHT_TILES:
                    tma.async_copy_global_to_shared(
                        right_scale, [c], full, right_scales.index(stage)
                    )
                step += 1


@gluon.constexpr_function
def whole_lines(columns, each):
    """A layout of 64 rows in which a warp has the 16 rows that it has of a product, but of each row
    all columns at once, a thread `each` of them."""
    lanes = columns // each
    return gl.BlockedLayout([lanes // 2, each], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def _barrier_code(what, warpgroup):
    """A named barrier of both warpgroups; Triton's own have small numbers. Without branches, as an
    mbarrier's wait has one: ptxas moved the sums to other registers at it and back, every time."""
    return f"bar.{what} {8 + warpgroup}, 256; mov.u32 $0, 0;"


@gluon.jit
def _take_turn(WARPGROUP: gl.constexpr):
    """Waits until the other warpgroup has given the turn."""
    gl.inline_asm_elementwise(
        _barrier_code("sync", WARPGROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def give_turn(WARPGROUP: gl.constexpr):
    """It is that warpgroup's turn; the giver goes on."""
    gl.inline_asm_elementwise(
        _barrier_code("arrive", WARPGROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def add_products(
    upper, lower, always, step, num_blocks, shared, ready, free, left_scale, right_scale,
    left_stride, right_stride, WARPGROUP: gl.constexpr, MMA: gl.constexpr,
    LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """The sums of a warpgroup's two blocks of 64 rows with the products of so many blocks of 128
    along K added, each scaled in fp32, and the steps done so far, one a block. Pointers to scales
    are used where one serves a tile: of the first block, and so many apart. `always` is true, which
    the compiler must not know. With TURNS the warpgroups begin their products in turns.

    Both halves of a block are written out. One body for either would have to choose its sums: by
    branches, before which 64 scales by column find no registers, or by predicates, which issue
    every addition twice. W2 by column at n = 2: 621 TFLOP/s predicated, 672 by branches, 729 so;
    L1 1,225 by branches, 1,312 so (H200, a sweep without a record).
    """
    left_shared, right_shared, left_scales, right_scales = shared
    OWN: gl.constexpr = upper.shape[1]
    FIRST: gl.constexpr = WARPGROUP * OWN
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    nothing = gl.zeros([64, OWN], gl.float32, layout=MMA)
    # One scale of a whole tile comes straight from memory, half a step or more ahead of its
    # product: copies of 128 bytes that begin anywhere, and reach over the end of all scales, were
    # an illegal instruction on an H200.
    if LEFT_TILES:
        of_left = gl.load(left_scale, mask=num_blocks > 0, other=0.0)
    if RIGHT_TILES:
        of_right = gl.load(right_scale, mask=num_blocks > 0, other=0.0)
    # Where a step's operands lie it has from the one before: nothing is worked out in front of a
    # product.
    stage = step % STAGES
    phase = step // STAGES & 1
    for block in range(0, num_blocks):
        mbarrier.wait(ready.index(stage), phase)
        right = right_shared.index(stage).slice(FIRST, OWN).permute((1, 0))
        if TURNS:
            _take_turn(WARPGROUP)
        product = warpgroup_mma(
            left_shared.index(2 * stage), right, nothing, use_acc=False, is_async=True
        )
        if TURNS:
            give_turn(1 - WARPGROUP)
        # Read while the tensor cores are at the product; the columns' serve both halves.
        if LEFT_TILES:
            of_rows = gl.full([64], of_left, gl.float32, layout=OF_ROWS)
        else:
            of_rows = left_scales.index(2 * stage).load(OF_ROWS)
        if RIGHT_TILES:
            of_columns = gl.full([OWN], of_right, gl.float32, layout=OF_COLUMNS)
        else:
            of_columns = right_scales.index(stage).slice(FIRST, OWN).load(OF_COLUMNS)
        product = warpgroup_mma_wait(0, deps=(product,))
        # A branch makes this a block of the code, which ends before what follows begins. Without it
        # ptxas 12.8 puts additions behind the second product, which then cannot take the registers
        # of the first, and values are moved in every step.
        if always:
            upper = gl.fma(product, of_rows[:, None] * of_columns[None, :], upper)
        if TURNS:
            _take_turn(WARPGROUP)
        product = warpgroup_mma(
            left_shared.index(2 * stage + 1), right, nothing, use_acc=False, is_async=True
        )
        if TURNS:
            give_turn(1 - WARPGROUP)
        if not LEFT_TILES:
            of_rows = left_scales.index(2 * stage + 1).load(OF_ROWS)
        ahead = gl.minimum(block + 1, num_blocks - 1)
        if LEFT_TILES:
            next_left = gl.load(left_scale + ahead * left_stride)
        if RIGHT_TILES:
            next_right = gl.load(right_scale + ahead * right_stride)
        product = warpgroup_mma_wait(0, deps=(product,))
        # Nothing of the stage is read any more: the scales are in registers.
        mbarrier.arrive(free.index(stage), count=1)
        lower = gl.fma(product, of_rows[:, None] * of_columns[None, :], lower)
        if LEFT_TILES:
            of_left = next_left
        if RIGHT_TILES:
            of_right = next_right
        is_last = stage == STAGES - 1
        phase = gl.where(is_last, 1 - phase, phase)
        stage = gl.where(is_last, 0, stage + 1)
    return upper, lower, step + num_blocks


@builtin
def _add_from_shared(target, place, source, _semantic=None):
    """TMA adds a tile in shared memory to the box of `target` at `place`, in its own time. Gluon
    has no name for it, its builder has."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, place, source.handle
    )


@gluon.jit
def _all_added():
    """Waits until the thread's additions by TMA are done. `tma.store_wait` only waits until they
    are read; those of two micro-batches could then still change places."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _begin_adding(target, row, column, x, sums, TURNED: gl.constexpr):
    """Lets TMA add x to the accumulator, by way of `sums`. What was there is read: the thread that
    issued that addition has waited, and the others do for it."""
    all_threads()
    if TURNED:
        sums.permute((1, 0)).store(x)
        fence_async_shared()
        _add_from_shared(target, [column, row], sums)
    else:
        sums.store(x)
        fence_async_shared()
        _add_from_shared(target, [row, column], sums)


@gluon.jit
def _multiply(
    target, sums, operands, starts, shared, ready, free, num_tiles, WARPGROUP: gl.constexpr,
    A: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, NUM: gl.constexpr,
    TURNED: gl.constexpr, BY_TMA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's columns."""
    OWN: gl.constexpr = COLUMNS // 2
    FIRST: gl.constexpr = WARPGROUP * OWN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 32])
    ROW_STRIDE: gl.constexpr = 1 if TURNED else C
    COLUMN_STRIDE: gl.constexpr = A if TURNED else 1
    if BY_TMA:
        own_sums = sums.index(WARPGROUP)
    # As products lie in registers, an instruction would touch eight rows, 32 bytes of each, and
    # take as long as for eight whole lines.
    OUT: gl.constexpr = MMA if TURNED else whole_lines(OWN, 4)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    columns = FIRST + gl.arange(0, OWN, layout=gl.SliceLayout(0, OUT))
    offsets = rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        expert, row, column = _place(tile, A, C, ROWS, COLUMNS, GROUP)
        for i in gl.static_range(NUM):
            first_row, stop_row = gl.load(starts[i] + expert), gl.load(starts[i] + expert + 1)
            num_blocks = (stop_row - first_row) // 128
            left_scale, right_scale = operands[4 * i + 2], operands[4 * i + 3]
            if LEFT_TILES:
                left_scale += first_row // 128 * (A // 128) + row // 128
            if RIGHT_TILES:
                right_scale += first_row // 128 * (C // 128) + (column + FIRST) // 128
            # Each micro-batch is summed from zero and added by itself: the same bits as one launch
            # each.
            upper = gl.zeros([64, OWN], gl.float32, layout=MMA)
            lower = gl.zeros([64, OWN], gl.float32, layout=MMA)
            upper, lower, step = add_products(
                upper, lower, first_row >= 0, step, num_blocks, shared, ready, free, left_scale,
                right_scale, A // 128, C // 128, WARPGROUP, MMA, LEFT_TILES, RIGHT_TILES, STAGES,
                False,
            )  # fmt: skip
            if num_blocks > 0:
                if BY_TMA:
                    at_row = row if TURNED else expert * A + row
                    at_column = (expert * C if TURNED else 0) + column + FIRST
                    _all_added()  # of the micro-batch before, which comes first
                    _begin_adding(target, at_row, at_column, upper, own_sums, TURNED)
                    tma.store_wait(0)  # other rows: it is enough that those are read
                    _begin_adding(target, at_row + 64, at_column, lower, own_sums, TURNED)
                else:
                    place = _accumulator(target, expert, row, column, A, C, TURNED)
                    # Nobody else adds there, and a thread's additions to a place keep their order.
                    gl.atomic_add(place + offsets, gl.convert_layout(upper, OUT), sem="relaxed")
                    place += 64 * ROW_STRIDE
                    gl.atomic_add(place + offsets, gl.convert_layout(lower, OUT), sem="relaxed")
    if BY_TMA:
        _all_added()  # shared memory stays until they are


@gluon.jit
def ring(STAGES: gl.constexpr):
    """Of each stage the barriers `ready`, with what one warp copies, and `free`, which both
    warpgroups give."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    return ready, free


@gluon.jit(do_not_specialize=["num_tiles"])
def weight_grad_kernel(
    target, num_tiles,
    left0, right0, left_scale0, right_scale0, start0,
    left1, right1, left_scale1, right_scale1, start1,
    left2, right2, left_scale2, right_scale2, start2,
    left3, right3, left_scale3, right_scale3, start3,
    A: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, NUM: gl.constexpr,
    TURNED: gl.constexpr, BY_TMA: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """`grouped_gemm._grouped_weight_grad`; any number of programs share the tiles.

    Descriptors by `descriptor`: left in boxes of 64 columns, right of COLUMNS; scales in boxes of
    as many, or as they are where one serves a tile. `target` is the accumulator; with BY_TMA its
    `sums_descriptor`.
    """
    operands = (
        left0, right0, left_scale0, right_scale0, left1, right1, left_scale1, right_scale1,
        left2, right2, left_scale2, right_scale2, left3, right3, left_scale3, right_scale3,
    )  # fmt: skip
    starts = (start0, start1, start2, start3)
    shared = (
        gl.allocate_shared_memory(left0.dtype, [2 * STAGES, 64, 128], left0.layout),
        gl.allocate_shared_memory(left0.dtype, [STAGES, COLUMNS, 128], left0.layout),
        gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], SCALE_LAYOUT),
        gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], SCALE_LAYOUT),
    )
    sums = ()
    if BY_TMA:
        BOX: gl.constexpr = [COLUMNS // 2, 64] if TURNED else [64, COLUMNS // 2]
        sums = gl.allocate_shared_memory(gl.float32, [2, BOX[0], BOX[1]], target.layout)
    ready, free = ring(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                target, sums, operands, starts, shared, ready, free, num_tiles, 0, A, C, ROWS,
                COLUMNS, GROUP, LEFT_TILES, RIGHT_TILES, NUM, TURNED, BY_TMA, STAGES,
            )),
            (_multiply, (
                target, sums, operands, starts, shared, ready, free, num_tiles, 1, A, C, ROWS,
                COLUMNS, GROUP, LEFT_TILES, RIGHT_TILES, NUM, TURNED, BY_TMA, STAGES,
            )),
            (_copy, (
                operands, starts, shared, ready, free, num_tiles, A, C, ROWS, COLUMNS, GROUP,
                LEFT_TILES, RIGHT_TILES, NUM, STAGES,
            )),
        ],
        [4, 1],
        # A thread's registers, of the second warpgroup and the copies; the first gets the rest.
        [240, 24],
    )  # fmt: skip
