"""A run on a command line: TOML files, later ones on top, and section.key=value texts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def files_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments with an equals sign are overrides, the others files."""
    files = [argument for argument in arguments if "=" not in argument]
    return files, [argument for argument in arguments if "=" in argument]


def add_run(parser: argparse.ArgumentParser, default: str) -> None:
    """The argument `run`: files and keys, as `files_and_overrides` takes them; `default` is the
    file where none is given."""
    parser.add_argument(
        "run",
        nargs="*",
        metavar="FILE or KEY=VALUE",
        help=f"run files, later ones on top, and keys; no file: {default}",
    )
