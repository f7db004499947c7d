"""Files that a command is to write, looked at before it works for them. No torch."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ppruntime.projection.projector import ProjectionError


def check_output(option: str, path: Path | None, *, makes_folder: bool = False) -> None:
    """Raises ProjectionError unless a file can be written at `path`, which `option` named; None:
    nothing was named. `makes_folder`: its folder is made where there is none."""
    if path is None:
        return
    if path.is_dir():
        raise ProjectionError(f"{option} {path} is a folder; name a file in it")
    folder = path.absolute().parent
    if not makes_folder and not folder.is_dir():
        raise ProjectionError(
            f"{option} {path}: there is no folder {path.parent}; make it or name another"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ProjectionError(
            f"{option} {path}: nothing can be written in {path.parent} ({error.strerror}); name "
            "another folder"
        ) from error
