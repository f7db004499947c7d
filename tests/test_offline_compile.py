"""What the offline compiles look for is found where it is: excerpts of code that was wrong once."""

from offline_compile import (
    _copies_moved,
    _halves_read_early,
    _product_loops,
    _slots_of_running_products,
    _stack_pointer_reads,
)

LOST_VALUE = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   IADD3 R1, R1, -0x18, RZ ;
        /*0020*/                   STL.64 [R1+0x8], R2 ;
        /*a2e0*/                   LOP3.LUT R5, R1, 0xffff, RZ, 0xc0, !PT ;
        /*a8b0*/                   LOP3.LUT R0, R1.reuse, 0xffff, RZ, 0xc0, !PT ;
        /*a8c0*/                   LOP3.LUT R10, R11, 0xffff, RZ, 0xc0, !PT ;
"""

EARLY_HALF = """
        /*0070*/                   IMAD R80, R2, 0x100, R79.reuse ;
        /*14d0*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R0, R7, R6, RZ ;
        /*14e0*/                   F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R4, R0 ;
        /*15d0*/                   LOP3.LUT R24, R80, 0xffff, RZ, 0xc0, !PT ;
        /*1610*/                   LOP3.LUT R25, R0, 0xffff, RZ, 0xc0, !PT ;
        /*1660*/                   PRMT R80, R4.reuse, 0x7610, R80 ;
        /*1670*/                   PRMT R0, R4, 0x7632, R0 ;
"""

PRODUCTS = """
    %x = ttg.local_alloc : () -> !ttg.memdesc<3x64x64xbf16, #shared, #smem, mutable>
    %w = ttg.local_alloc : () -> !ttg.memdesc<4x64x64xbf16, #shared1, #smem, mutable>
    %0 = scf.for %i = %c0 to %c80 step %c1 {
      %x_1 = ttg.memdesc_index %x[%a] : !ttg.memdesc<3x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %w_1 = ttg.memdesc_index %w[%b] : !ttg.memdesc<4x64x64xbf16> -> !ttg.memdesc<64x64xbf16>
      %w_2 = ttg.memdesc_trans %w_1 {order = array<i32: 1, 0>} : !ttg.memdesc<64x64xbf16>
      %acc_1 = ttng.warp_group_dot %x_1, %w_2, %acc {isAsync = true} : !ttg.memdesc<64x64xbf16>
      %acc_2 = ttng.warp_group_dot_wait %acc_1 {pendings = 1 : i32} : tensor<64x64xf32, #mma>
    }
"""


LOOPS = """
.L_x_1:
        /*0010*/                   STL [R1], R2 ;
.L_x_2:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
.L_x_3:
        /*0040*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT ;
        /*0050*/                   LDL R5, [R1] ;
.L_x_6:
        /*0058*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR8], RZ, !UPT ;
.L_x_4:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0070*/              @!P0 BRA `(.L_x_4) ;
        /*0080*/               @P1 BRA `(.L_x_3) ;
        /*0090*/                   STL [R1], R4 ;
        /*00a0*/               @P2 BRA `(.L_x_1) ;
        /*00b0*/                   BRA `(.L_x_6) ;
        /*00b8*/                   BRA `(.L_x_5) ;
.L_x_5:
        /*00c0*/                   EXIT ;
"""


def test_the_innermost_loop_with_products_is_found_and_no_other():
    [loop] = _product_loops(LOOPS)
    assert "/*0040*/" in loop.splitlines()[1]
    assert "/*0080*/" in loop.splitlines()[-1]
    assert _product_loops(LOOPS.replace("QGMMA", "FFMA")) == []


def test_an_instruction_that_computes_with_the_stack_pointer_is_found_and_no_other():
    found = _stack_pointer_reads(LOST_VALUE)
    assert [line.split()[0] for line in found] == ["/*a2e0*/", "/*a8b0*/"]


def test_a_half_that_is_read_before_it_is_there_is_found_and_no_other():
    assert _halves_read_early(EARLY_HALF) == ["LOP3.LUT R24, R80, 0xffff, RZ, 0xc0, !PT"]
    assert _halves_read_early(EARLY_HALF.replace("IMAD", "PRMT")) == []


def test_operands_of_products_that_run_on_are_told_with_their_room():
    assert _slots_of_running_products(PRODUCTS) == {"%w": 4, "%x": 3}


def test_products_that_are_waited_for_need_no_more_room():
    assert _slots_of_running_products(PRODUCTS.replace("pendings = 1", "pendings = 0")) == {}


def layout(size, lanes, warps, order):
    return (
        f"#ttg.blocked<{{sizePerThread = {size}, threadsPerWarp = {lanes}, "
        f"warpsPerCTA = {warps}, order = {order}}}>"
    )


def copies_moved(before, after):
    return _copies_moved(f"""
#blocked = {layout([1, 1, 1], [8, 1, 4], [4, 1, 1], [2, 0, 1])}
#blocked1 = {layout([1, 1], [8, 4], [4, 1], [1, 0])}
#blocked2 = {layout([1], [32], [4], [0])}
#blocked3 = {layout([1, 1], [32, 1], [1, 4], [0, 1])}
    %1 = ttg.convert_layout %0 : {before} -> {after} loc(#loc2)
#loc1 = loc("/a/kernel.py":2:39)
#loc2 = loc("sum"(#loc1))
""")


def test_copies_that_meet_in_shared_memory_are_found_and_no_others():
    of_rows = "#ttg.slice<{dim = 1, parent = #ttg.slice<{dim = 2, parent = #blocked}>}>"
    sums = f"tensor<32xf32, {of_rows}>"
    assert copies_moved(sums, "tensor<32xf32, #blocked2>") == ("kernel.py:2",)
    # Where every thread has them already, and where each has a value of its own.
    there = "tensor<32xf32, #ttg.slice<{dim = 1, parent = #blocked1}>>"
    assert copies_moved(sums, there) == ()
    assert copies_moved("tensor<32x4xf32, #blocked1>", "tensor<32x4xf32, #blocked3>") == ()
