"""A run on a command line: TOML files, later ones on top, and section.key=value texts."""

from __future__ import annotations

from collections.abc import Sequence


def files_and_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments with an equals sign are overrides, the others files."""
    files = [argument for argument in arguments if "=" not in argument]
    return files, [argument for argument in arguments if "=" in argument]
