"""What all benches do with their records, and when they are told to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn


def write_record(path: Path, record: Mapping[str, object]) -> None:
    """The record as JSON, whole or not at all; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(record, indent=1) + "\n")
    new.rename(path)


def end_in_order() -> None:
    """From here on SIGTERM and Ctrl-C end this process once, by KeyboardInterrupt, and are ignored
    after that: what was measured is still written."""
    for told in _TO_END:
        signal.signal(told, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    for told in _TO_END:
        signal.signal(told, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_python(arguments: Sequence[str]) -> int:
    """Runs `python ARGUMENTS` and gives its exit code. Who tells this process to end tells that
    one, which is waited for: a shell or a timeout may know this one alone."""
    with subprocess.Popen([sys.executable, *arguments]) as process:
        before = {
            told: signal.signal(told, lambda signum, _: process.send_signal(signum))
            for told in _TO_END
        }
        try:
            return process.wait()
        finally:
            for told, handler in before.items():
                signal.signal(told, handler)


_TO_END = (signal.SIGTERM, signal.SIGINT)
