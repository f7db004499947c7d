"""What the documents say runs: the guide's code, the README's commands, the links."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide.md").read_text()


def test_the_guides_ten_lines_are_a_passing_test(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    (tmp_path / "test_mine.py").write_text(block)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        check=True,
        cwd=ROOT,
        timeout=120,
    )


@pytest.mark.parametrize(
    "command",
    [
        line.split("#")[0].strip()
        for line in README.splitlines()
        if line.startswith("ppruntime ") and "plan" not in line
    ],
)
def test_the_readmes_commands_run(command):
    arguments = command.split()[1:]
    subprocess.run(
        [sys.executable, "-m", "ppruntime.launch.cli", *arguments],
        check=True,
        cwd=ROOT,
        timeout=120,
        capture_output=True,
    )


def test_every_link_in_the_documents_leads_somewhere():
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_every_measurement_says_with_what_and_when_it_was_made():
    for path in sorted((ROOT / "docs" / "bench").glob("*.json")):
        record = json.loads(path.read_text())
        for key in ("command", "device", "versions", "date"):
            assert record.get(key), f"{path.name} lacks {key}"


def test_every_python_file_ends_up_in_the_map_of_its_room():
    inner = (f"ppruntime/{name}" for name in ("config", "data", "experts", "projection"))
    for room in ("schedules", "transports", "models", *inner):
        room_map = (ROOT / room / "__init__.py").read_text().split('"""')[1]
        for path in (ROOT / room).glob("*.py"):
            if path.stem != "__init__":
                assert re.search(rf"\b{path.stem}\b", room_map), (
                    f"{room}/{path.name} is not in the map"
                )
