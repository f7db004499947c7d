"""The page of the MoE layer's tests: each is there, and runs where the page says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "moe-tests.md"
NAMED = r"`([\w/]+\.py)::(test_\w+)`"
NEEDS_A_GPU = r"pytest\.mark\.(?:multi_)?gpu\b"


def rows():
    """What is shown, and the texts of both columns."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def functions(path):
    return {
        node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    }


def test_every_row_names_tests_that_are_there_or_says_why_there_is_none():
    assert len(rows()) > 35
    for what, *columns in rows():
        assert len(columns) == 2, what
        for column in columns:
            named = re.findall(NAMED, column)
            assert named or column.startswith(("none: ", "needs ")), (what, column)
            assert len(named) == column.count("::"), (what, column)
            for file, name in named:
                assert name in functions(ROOT / "tests" / file), (what, file, name)


def test_what_stands_for_a_gpu_is_marked_so_and_what_stands_for_a_cpu_runs_without():
    for what, on_cpu, on_gpu in rows():
        for file, _ in re.findall(NAMED, on_gpu):
            text = (ROOT / "tests" / file).read_text()
            assert re.search(NEEDS_A_GPU, text), (what, file)
        for file, name in re.findall(NAMED, on_cpu):
            text = (ROOT / "tests" / file).read_text()
            for marks in re.findall(r"^pytestmark = (\[.*?\]\n|.*?\n)", text, re.M | re.S):
                assert not re.search(NEEDS_A_GPU, marks) or "if ON_GPU" in marks, (what, file)
            above = text.partition(f"def {name}(")[0].rpartition("\n\n\n")[2]
            assert not re.search(r"@(?:pytest\.mark\.)?(?:multi_)?gpu\b", above), (what, name)
