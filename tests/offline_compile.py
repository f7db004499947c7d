"""Compiles kernels for Hopper without a GPU, and reads what the compiler made of them.

    with captured() as kernels:
        grouped_gemm(...)      # on meta tensors: nothing runs
    kernels[0].spills

Needs Triton imported without TRITON_INTERPRET: run it in a process of its own.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as LaidOutDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel as sm_90 machine code."""

    name: str
    registers: int
    shared_bytes: int
    spills: int
    """Local loads and stores."""
    product_loops: int
    """Innermost loops with warpgroup products."""
    spills_in_loops: int
    """Local loads and stores in those."""
    matrix_instructions: int
    """Warpgroup FP8 and bf16 products."""
    narrow_accesses: int
    """Global loads and stores of single bytes and half words."""
    wide_accesses: int
    """Those of 16 bytes, TMA not counted."""
    copies_moved: tuple[str, ...]
    """Where threads write one value, of which each holds a copy, to one place in shared memory, as
    "file.py:12": no matter while the copies are the same to the bit."""
    ptx: str = field(repr=False)
    """What Triton gave to ptxas: there fences and scopes stand as they are meant."""


@contextmanager
def captured() -> Iterator[list[Compiled]]:
    """Inside, launching a kernel compiles it and adds it to the list."""
    compiled: list[Compiled] = []
    launch = JITFunction.__getitem__

    def compile_instead(kernel: Any, grid: object) -> Any:
        del grid
        return lambda *args, **options: compiled.append(_compile(kernel, args, options))

    JITFunction.__getitem__ = compile_instead
    try:
        yield compiled
    finally:
        JITFunction.__getitem__ = launch


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    for i, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, TensorDescriptor):
            block = list(value.block_shape)
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{block}>"
        elif isinstance(value, LaidOutDescriptor):
            block = f"{list(value.block_shape)},{value.layout!r}"
            signature[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{block}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    of_kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = of_kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: value for name, value in options.items() if value is not None}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    wrong = _stack_pointer_reads(code)
    assert not wrong, f"{kernel.__name__}: ptxas lost a value: {wrong[0].strip()}"
    early = _halves_read_early(code)
    assert not early, f"{kernel.__name__}: ptxas reads a half before it is there: {early[0]}"
    slots = _slots_of_running_products(binary.asm["ttgir"])
    assert len(set(slots.values())) <= 1, (
        f"{kernel.__name__}: products run on into the next step while their operands have "
        f"{slots} slots: one is written over while it is read"
    )
    loops = _product_loops(code)
    return Compiled(
        kernel.__name__,
        int(re.search(r"REG:(\d+)", usage)[1]),
        binary.metadata.shared,
        len(re.findall(_SPILL, code)),
        len(loops),
        sum(len(re.findall(_SPILL, loop)) for loop in loops),
        len(re.findall(_PRODUCT, code)),
        len(re.findall(r"(?:LDG|STG)\.E\.[US](?:8|16)", code)),
        len(re.findall(r"(?:LDG|STG)\.E(?:\.\w+)*\.128", code)),
        _copies_moved(binary.asm["ttgir"]),
        binary.asm["ptx"],
    )


_SPILL, _PRODUCT = r" (?:STL|LDL)", r"[QH]GMMA"


def _product_loops(code: str) -> list[str]:
    """The innermost loops with products in them: from a label to a jump back to it, none around
    another. Waits, which are loops too, have no products; waits that stand elsewhere jump into the
    middle of a loop."""
    lines = code.splitlines()
    labels: dict[str, int] = {}
    found: dict[int, int] = {}
    for i, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line.strip()):
            labels[label[1]] = i
        jump = re.search(r"BRA(?:\.\w+)* .*`\((\.L\w+)\)", line)
        if jump and jump[1] in labels:
            first = labels[jump[1]]
            is_other = any(first < start or start < first < last for start, last in found.items())
            if not is_other and re.search(_PRODUCT, "\n".join(lines[first:i])):
                found[first] = i
    return ["\n".join(lines[first : last + 1]) for first, last in found.items()]


def _stack_pointer_reads(code: str) -> list[str]:
    """Instructions that compute with R1, the stack pointer, which is set once and then only an
    address or moved by a constant. ptxas 12.8 made such code of a byte that it had lost."""
    reads = [line for line in code.splitlines() if re.search(r"[ ,]R1(?:\.\w+)*[ ,;]", line)]
    allowed = r"\bR1, (?:RZ, RZ, )?c\[|(?:IADD3|VIADD) R1, R1,"
    return [line for line in reads if not re.search(allowed, line)]


def _halves_read_early(code: str) -> list[str]:
    """Instructions that take a register's lower half where the next one to write it puts a half
    there, and what it holds until then was no half: an address, say. ptxas 12.8 makes such code of
    halves whose bytes are taken apart and which go into words, too.

    Reads code from top to bottom, which is how kernels without loops over such values run."""
    early: list[str] = []
    writers: dict[str, str] = {}
    waiting: dict[str, str] = {}
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+([^;]+);", code):
        written = re.match(r"(?:@!?U?P\d )?(\S+) (?:!?U?P\w+, )*(R\d+),", instruction)
        read = re.search(r"LOP3\.LUT R\d+, (R\d+)(?:\.reuse)?, 0xffff, RZ, 0xc0", instruction)
        if read and not re.match(_MAKES_HALVES, writers.get(read[1], "")):
            waiting.setdefault(read[1], instruction.strip())
        if not written:
            continue
        name = written[2]
        if name in waiting and re.search(rf"PRMT {name}, R\d+\S*, 0x7610, {name}", instruction):
            early.append(waiting[name])
        waiting.pop(name, None)
        writers[name] = written[1]
    return early


_MAKES_HALVES = r"F2FP|F2F|PRMT|LD\S*\.U16|H\w+2|I2I|SEL|MOV|IMAD\.MOV"


def _slots_of_running_products(ttgir: str) -> dict[str, int]:
    """Steps for which there is room, of each operand in shared memory of products that the next
    step need not wait for; empty where all products are waited for.

    Such an operand needs room for one step more than is loaded ahead. Triton 3.6 forgets that where
    something else reads it too.
    """
    if not re.search(r"pendings = [1-9]", ttgir):
        return {}
    room = dict(
        re.findall(r"(%[\w#]+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x", ttgir)
    )
    place_of = dict(re.findall(r"(%[\w#]+) = ttg\.memdesc_index (%[\w#]+)\[", ttgir))
    for turned, of in re.findall(r"(%[\w#]+) = ttg\.memdesc_trans (%[\w#]+) ", ttgir):
        place_of[turned] = place_of.get(of, of)
    operands = re.findall(r"warp_group_dot (%[\w#]+), (%[\w#]+),", ttgir)
    places = {place_of.get(name, name) for pair in operands for name in pair}
    return {name: int(room[name]) for name in sorted(places) if name in room}


def _copies_moved(ttgir: str) -> tuple[str, ...]:
    """Places of conversions of values of which several threads hold copies, to a layout in which a
    thread gets values that it does not have. Layouts of products hold none and are left out."""
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", ttgir, re.MULTILINE))
    of_tensor = r"tensor<([\dx]+)x\w+, ((?:#ttg\.slice<\{dim = \d+, parent = )*#\w+(?:\}>)*)>"
    conversion = rf"ttg\.convert_layout %\S+ : {of_tensor} -> {of_tensor} loc\((#\w+)\)"
    moved = []
    for size, before, _, after, place in re.findall(conversion, ttgir):
        shape = [int(n) for n in size.split("x")]
        if any(re.search(r"#\w+(?=[}>]*$)", text)[0] not in layouts for text in (before, after)):
            continue
        had, wanted = _held(before, layouts, shape), _held(after, layouts, shape)
        elements = [element for held in had for element in held]
        has_copies = len(elements) > len(set(elements))
        if has_copies and any(not new <= old for old, new in zip(had, wanted, strict=True)):
            moved.append(_line_of(place, ttgir))
    return tuple(moved)


def _line_of(place: str, ttgir: str) -> str:
    """File and line behind a location such as #loc7. The file's name alone: what Triton has in its
    cache may have been compiled in another folder."""
    text = re.search(rf"^{place} = loc\((.*)\)$", ttgir, re.MULTILINE)[1]
    if file := re.match(r'"(.+)":(\d+):\d+', text):
        return f"{Path(file[1]).name}:{file[2]}"
    return _line_of(re.search(r"#loc\d+", text)[0], ttgir)


def _held(text: str, layouts: dict[str, str], shape: list[int]) -> list[set[tuple[int, ...]]]:
    """By thread, which elements of a tensor it holds."""
    own = layouts[re.search(r"#\w+(?=[}>]*$)", text)[0]]
    sizes, lanes, warps, order = (
        [int(n) for n in re.search(rf"{key} = \[([\d, ]+)\]", own)[1].split(",")]
        for key in ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")
    )
    kept = list(range(len(order)))
    for axis in reversed(re.findall(r"dim = (\d+)", text)):  # the innermost slice is cut first
        del kept[int(axis)]

    def places(number: int, counts: list[int]) -> dict[int, int]:
        found = {}
        for axis in order:
            number, found[axis] = divmod(number, counts[axis])
        return found

    threads = []
    for warp, lane in product(range(math.prod(warps)), range(math.prod(lanes))):
        of_warp, of_lane = places(warp, warps), places(lane, lanes)
        rows = []
        for axis, length in zip(kept, shape, strict=True):
            first = (of_warp[axis] * lanes[axis] + of_lane[axis]) * sizes[axis]
            period = warps[axis] * lanes[axis] * sizes[axis]
            starts = range(first, max(length, first + 1), period)
            rows.append({(i + n) % length for i in starts for n in range(sizes[axis])})
        threads.append(set(product(*rows)))
    return threads


def _run(tool: str, *arguments: str) -> str:
    found = subprocess.run(
        [str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True
    )
    return found.stdout + found.stderr
