"""What all benches do with their records, and when they are told to end."""

from __future__ import annotations

import json
import os
import signal
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
    """From here on SIGTERM ends this process as Ctrl-C does: what was measured is still written."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def become(arguments: Sequence[str]) -> NoReturn:
    """Goes on as `python ARGUMENTS`, in this process: signals then reach who has to hear them."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *arguments])
