"""Rooms import downwards only, and the package list, links and mapping agree."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("schedules", "transports", "models", "launch")
LOWER = ("schedules", "transports", "models")


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    inside_links = [ROOT / "ppruntime" / name for name in ROOMS]
    return [f for f in found if not any(link in f.parents for link in inside_links)]


@pytest.mark.parametrize("room", LOWER)
def test_lower_rooms_know_nothing_of_each_other_nor_of_what_ties_them(room):
    for path in files(room):
        for name in imports_of(path):
            if name == "ppruntime" or name.startswith("ppruntime."):
                assert name == "ppruntime" or name.startswith(f"ppruntime.{room}"), (
                    f"{path} imports {name}"
                )


def test_schedules_import_the_standard_library_alone():
    for path in files("schedules"):
        for name in imports_of(path):
            top = name.partition(".")[0]
            assert top == "ppruntime" or top in sys.stdlib_module_names, f"{path} imports {name}"


def test_ppruntime_does_not_import_launch():
    for path in files("ppruntime"):
        assert not any(name.startswith("ppruntime.launch") for name in imports_of(path)), path


def test_only_the_executor_sees_ops_and_transports_together():
    meets = [
        path.name
        for path in files("ppruntime")
        if any(name.startswith("ppruntime.schedules.ops") for name in imports_of(path))
        and "ppruntime.transports.base.Transport" in imports_of(path)
        and "ppruntime.schedules.ops.Kind" in imports_of(path)
    ]
    # The rig drives the executor with stages that sleep; it is a bench, not a second runtime.
    assert [name for name in meets if name != "sleep_rig.py"] == ["executor.py"]


def test_links_mapping_and_package_list_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for room in ROOMS:
        assert os.readlink(ROOT / "ppruntime" / room) == f"../{room}"
        assert project["package-dir"][f"ppruntime.{room}"] == room
    packages = {"ppruntime"} | {f"ppruntime.{room}" for room in ROOMS}
    for room in ("ppruntime", *ROOMS):
        prefix = "ppruntime" if room == "ppruntime" else f"ppruntime.{room}"
        for path in files(room):
            inner = path.parent.relative_to(ROOT / room)
            packages.add(".".join((prefix, *inner.parts)))
    assert set(project["packages"]) == packages


@pytest.mark.parametrize(
    "module",
    [
        "ppruntime",
        "ppruntime.config",
        "ppruntime.data",
        "ppruntime.experts.arena_bytes",
        "ppruntime.projection.headline",
        "ppruntime.projection.planner_inputs",
        "ppruntime.projection.simulate",
        "ppruntime.schedules",
        "ppruntime.models.dims",
        "ppruntime.launch.cli",
    ],
)
def test_planning_and_the_command_line_load_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_no_pickle_and_no_eval_in_what_ships():
    for room in ("ppruntime", *ROOMS):
        for path in files(room):
            used = {
                node.func.id
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not used & {"eval", "exec"}, path
            assert not any(name.split(".")[0] in ("pickle", "dill") for name in imports_of(path)), (
                path
            )
