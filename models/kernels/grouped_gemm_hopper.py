# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Gluon kernel of grouped_gemm.py beside this file, for Hopper: the experts' weight gradient.

Triton's kernel moves 24 KB of operands through the second-level cache for a product of 64 x 128 and
128 rows: 27 GB a micro-batch at V4.1's widths. Larger tiles need fewer bytes, and a tile of
128 x 256 (14 GB) is the largest whose sums fit into registers. It fills a multiprocessor by itself;
so three groups of warps work side by side:

    copy        one warp: TMA copies of the next steps' operands and scales into a ring of stages
    multiply    two warpgroups: one half of the tile's columns each, 128 x 128, as two products of
                64 x 128 a step, so that the product on its way takes 64 registers beside 128 sums

While one warpgroup scales and adds a product, the tensor cores have the other's. The second-level
cache adds the sums to memory (`red`), whole lines at a time: nothing waits for what was there, but
a sum that is subnormal becomes zero. The copies go on meanwhile, over the ends of tiles.

Gluon has no interpreter: this runs on a GPU only; tests/simulated_gluon.py runs what it computes,
its warps in any order that the barriers allow. docs/bench/moe-experts.json has its times.
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
SUM_LAYOUT = gl.NVMMASharedLayout(128, 32, 2)
"""Of sums that TMA adds."""
all_threads = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
SCALE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(0, 32, 1))


def descriptor(x: Tensor, box: int) -> TensorDescriptor:
    """Of FP8 values, columns as [blocks x width, 128] or rows, or of scales, flat: a copy takes
    `box` of the first, and 128 values of each."""
    if x.dim() == 1:
        return TensorDescriptor.from_tensor(x, [box], SCALE_LAYOUT.value)
    return TensorDescriptor.from_tensor(x, [box, 128], DATA_LAYOUT)


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
    gl.inline_asm_elementwise(
        _barrier_code("arrive", WARPGROUP), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _both_halves(
    upper, lower, always, step, num_blocks, shared, ready, free, left_scale, right_scale,
    left_stride, right_stride, WARPGROUP: gl.constexpr, MMA: gl.constexpr,
    LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """`add_products` with both halves of a block written out, one after the other."""
    left_shared, right_shared, left_scales, right_scales = shared
    OWN: gl.constexpr = upper.shape[1]
    FIRST: gl.constexpr = WARPGROUP * OWN
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    nothing = gl.zeros([64, OWN], gl.float32, layout=MMA)
    if LEFT_TILES:
        of_left = gl.load(left_scale, mask=num_blocks > 0, other=0.0)
    if RIGHT_TILES:
        of_right = gl.load(right_scale, mask=num_blocks > 0, other=0.0)
    stage = step // 2 % STAGES
    phase = step // (2 * STAGES) & 1
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
        if LEFT_TILES:
            of_rows = gl.full([64], of_left, gl.float32, layout=OF_ROWS)
        else:
            of_rows = left_scales.index(2 * stage).load(OF_ROWS)
        if FORM == 2:
            product = warpgroup_mma_wait(0, deps=(product,))
        if RIGHT_TILES:
            of_columns = gl.full([OWN], of_right, gl.float32, layout=OF_COLUMNS)
        else:
            of_columns = right_scales.index(stage).slice(FIRST, OWN).load(OF_COLUMNS)
        if FORM == 3:
            product = warpgroup_mma_wait(0, deps=(product,))
        # The compiler does not know that this is always so, and does all of it before what follows:
        # else it moved additions behind the next product, which then took other registers.
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
        mbarrier.arrive(free.index(stage), count=1)
        lower = gl.fma(product, of_rows[:, None] * of_columns[None, :], lower)
        if LEFT_TILES:
            of_left = next_left
        if RIGHT_TILES:
            of_right = next_right
        is_last = stage == STAGES - 1
        phase = gl.where(is_last, 1 - phase, phase)
        stage = gl.where(is_last, 0, stage + 1)
    return upper, lower, step + 2 * num_blocks


@gluon.jit
def add_products(
    upper, lower, always, step, num_blocks, shared, ready, free, left_scale, right_scale,
    left_stride, right_stride, WARPGROUP: gl.constexpr, MMA: gl.constexpr,
    LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, STAGES: gl.constexpr,
    TURNS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The sums of a warpgroup's two blocks of 64 rows with the products of so many blocks of 128
    along K added, each scaled in fp32, and the half steps done so far. Pointers to scales are used
    where one serves a tile: of the first block, and so many apart. `always` is true, which the
    compiler must not know."""
    left_shared, right_shared, left_scales, right_scales = shared
    OWN: gl.constexpr = upper.shape[1]
    FIRST: gl.constexpr = WARPGROUP * OWN
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    OF_COLUMNS: gl.constexpr = gl.SliceLayout(0, MMA)
    nothing = gl.zeros([64, OWN], gl.float32, layout=MMA)
    # One scale of a whole tile comes straight from memory, half a step ahead of its product: copies
    # of 128 bytes that begin anywhere, and reach over the end of all scales, were an illegal
    # instruction on an H200.
    if LEFT_TILES:
        of_left = gl.load(left_scale, mask=num_blocks > 0, other=0.0)
    if RIGHT_TILES:
        of_right = gl.load(right_scale, mask=num_blocks > 0, other=0.0)
    if FORM >= 2:
        return _both_halves(
            upper, lower, always, step, num_blocks, shared, ready, free, left_scale, right_scale,
            left_stride, right_stride, WARPGROUP, MMA, LEFT_TILES, RIGHT_TILES, STAGES, TURNS, FORM,
        )  # fmt: skip
    # Half a step a time: from one place in the code, all products use the same registers.
    # What it needs first it has from the one before: nothing is worked out in front of a product.
    stage = step // 2 % STAGES
    phase = step // (2 * STAGES) & 1
    for half_block in range(0, 2 * num_blocks):
        half = half_block % 2
        mbarrier.wait(ready.index(stage), phase)
        if TURNS:
            _take_turn(WARPGROUP)
        product = warpgroup_mma(
            left_shared.index(2 * stage + half),
            right_shared.index(stage).slice(FIRST, OWN).permute((1, 0)),
            nothing,
            use_acc=False,
            is_async=True,
        )
        if TURNS:
            give_turn(1 - WARPGROUP)
        ahead = gl.minimum((half_block + 1) // 2, num_blocks - 1)
        if LEFT_TILES:
            next_left = gl.load(left_scale + ahead * left_stride)
        if RIGHT_TILES:
            next_right = gl.load(right_scale + ahead * right_stride)
        if LEFT_TILES:
            of_rows = gl.full([64], of_left, gl.float32, layout=OF_ROWS)
        else:
            of_rows = left_scales.index(2 * stage + half).load(OF_ROWS)
        product = warpgroup_mma_wait(0, deps=(product,))
        # Read afterwards: there are no registers left to hold so many during the product.
        if RIGHT_TILES:
            of_columns = gl.full([OWN], of_right, gl.float32, layout=OF_COLUMNS)
        elif FORM == 0:
            of_columns = right_scales.index(stage).slice(FIRST, OWN).load(OF_COLUMNS)
        if FORM == 0 or RIGHT_TILES:
            mbarrier.arrive(free.index(stage), count=1, pred=half == 1)
        this = stage
        is_last = (half == 1) & (stage == STAGES - 1)
        phase = gl.where(is_last, 1 - phase, phase)
        stage = gl.where(is_last, 0, stage + half)
        if FORM == 0 or RIGHT_TILES:
            scale = of_rows[:, None] * of_columns[None, :]
        if RIGHT_TILES:
            # By branches, so that half of the additions are not done.
            if half == 0:
                upper = gl.fma(product, scale, upper)
            else:
                lower = gl.fma(product, scale, lower)
        elif FORM == 0:
            # Predicated: before branches, 64 scales would need registers that are not there.
            upper = gl.where(half == 0, gl.fma(product, scale, upper), upper)
            lower = gl.where(half == 0, lower, gl.fma(product, scale, lower))
        else:
            # Read in each branch and multiplied otherwise, or the compiler makes one of both.
            if half == 0:
                of_columns = right_scales.index(this).slice(FIRST, OWN).load(OF_COLUMNS)
                upper = gl.fma(product, of_rows[:, None] * of_columns[None, :], upper)
            else:
                of_columns = right_scales.index(this).slice(FIRST, OWN).load(OF_COLUMNS)
                mbarrier.arrive(free.index(this), count=1)
                scale = gl.fma(of_rows[:, None], of_columns[None, :], nothing)
                lower = gl.fma(product, scale, lower)
        if LEFT_TILES:
            of_left = next_left
        if RIGHT_TILES:
            of_right = next_right
    return upper, lower, step + 2 * num_blocks


@builtin
def _add_from_shared(target, place, source, _semantic=None):
    """TMA adds a tile in shared memory to the box of `target` at `place`, in its own time."""
    place = _semantic._convert_to_ir_values(place, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, target.handle, place, source.handle
    )


@gluon.jit
def _all_added():
    """Waits until the thread's additions by TMA are done, not only read: their order is then that
    of the micro-batches."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _add_by_copies(acc, row, column, x, sums, TURNED: gl.constexpr):
    all_threads()  # whoever issued the last copy has waited for it
    if TURNED:
        sums.permute((1, 0)).store(x)
        fence_async_shared()
        _add_from_shared(acc, [column, row], sums)
    else:
        sums.store(x)
        fence_async_shared()
        _add_from_shared(acc, [row, column], sums)


@gluon.jit
def _multiply(
    acc_ptr, sums, operands, starts, shared, ready, free, num_tiles, WARPGROUP: gl.constexpr,
    A: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, NUM: gl.constexpr,
    TURNED: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, FORM: gl.constexpr,
    BY_COPIES: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its half of every tile's columns."""
    OWN: gl.constexpr = COLUMNS // 2
    FIRST: gl.constexpr = WARPGROUP * OWN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN, 32])
    ROW_STRIDE: gl.constexpr = 1 if TURNED else C
    COLUMN_STRIDE: gl.constexpr = A if TURNED else 1
    if BY_COPIES:
        own_sums = sums.index(WARPGROUP)
    # As products lie in registers, an instruction would touch eight rows, 32 bytes of each, and
    # take as long as for eight whole lines.
    OUT: gl.constexpr = MMA if TURNED else whole_lines(OWN, 4)
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    columns = FIRST + gl.arange(0, OWN, layout=gl.SliceLayout(0, OUT))
    offsets = rows[:, None] * ROW_STRIDE + columns[None, :] * COLUMN_STRIDE
    if TURNS and WARPGROUP == 1:
        give_turn(0)  # it begins
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
                TURNS, FORM,
            )  # fmt: skip
            if num_blocks > 0:
                if BY_COPIES:
                    at_row = row if TURNED else expert * A + row
                    at_column = (expert * C if TURNED else 0) + column + FIRST
                    _all_added()
                    _add_by_copies(acc_ptr, at_row, at_column, upper, own_sums, TURNED)
                    tma.store_wait(0)
                    _add_by_copies(acc_ptr, at_row + 64, at_column, lower, own_sums, TURNED)
                else:
                    place = _accumulator(acc_ptr, expert, row, column, A, C, TURNED)
                    # Nobody else adds there, and a thread's additions to a place keep their order.
                    gl.atomic_add(place + offsets, gl.convert_layout(upper, OUT), sem="relaxed")
                    place += 64 * ROW_STRIDE
                    gl.atomic_add(place + offsets, gl.convert_layout(lower, OUT), sem="relaxed")
    if BY_COPIES:
        _all_added()


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
    acc_ptr, num_tiles,
    left0, right0, left_scale0, right_scale0, start0,
    left1, right1, left_scale1, right_scale1, start1,
    left2, right2, left_scale2, right_scale2, start2,
    left3, right3, left_scale3, right_scale3, start3,
    A: gl.constexpr, C: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, LEFT_TILES: gl.constexpr, RIGHT_TILES: gl.constexpr, NUM: gl.constexpr,
    TURNED: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, FORM: gl.constexpr,
    BY_COPIES: gl.constexpr,
):  # fmt: skip
    """`grouped_gemm._grouped_weight_grad`; any number of programs share the tiles.

    Descriptors by `descriptor`: left in boxes of 64 columns, right of COLUMNS; scales in boxes of
    as many, or as they are where one serves a tile.
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
    if BY_COPIES:
        SHAPE: gl.constexpr = [2, 64, COLUMNS // 2] if not TURNED else [2, COLUMNS // 2, 64]
        sums = gl.allocate_shared_memory(gl.float32, SHAPE, acc_ptr.layout)
    else:
        sums = num_tiles
    ready, free = ring(STAGES)
    gl.warp_specialize(
        [
            (_multiply, (
                acc_ptr, sums, operands, starts, shared, ready, free, num_tiles, 0, A, C, ROWS,
                COLUMNS, GROUP, LEFT_TILES, RIGHT_TILES, NUM, TURNED, STAGES,
                TURNS, FORM, BY_COPIES,
            )),
            (_multiply, (
                acc_ptr, sums, operands, starts, shared, ready, free, num_tiles, 1, A, C, ROWS,
                COLUMNS, GROUP, LEFT_TILES, RIGHT_TILES, NUM, TURNED, STAGES,
                TURNS, FORM, BY_COPIES,
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
