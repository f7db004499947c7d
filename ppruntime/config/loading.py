"""TOML files and overrides -> `Config` and back.

A config that cannot be run is refused here, before anything starts, with every mistake it has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ppruntime.config.errors import ConfigError
from ppruntime.config.keys import TRAIN_KEYS_OF_DIMS, Config
from ppruntime.config.reading import Reading


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """The config that `paths` give, the last file first, with `section.key=value` texts on top.

    An override's value is TOML; a bare word is a text; the word `default` takes back what files
    set. Raises ConfigError with all mistakes, each with the place that set the value.
    """
    reading = Reading()
    for path in paths:
        reading.add_file(Path(path))
    for override in overrides:
        reading.add_override(override)
    return reading.config()


def check_world_size(config: Config, num_processes: int) -> None:
    """Raises ConfigError unless as many processes were started as the run needs."""
    needed = config.world_size
    if num_processes != needed:
        raise ConfigError(
            f"pp.size {config.pp.size} x parallel.dp {config.parallel.dp} x parallel.ep "
            f"{config.parallel.ep} needs {needed} process{'es' * (needed > 1)}, but "
            f"{num_processes} {'were' if num_processes > 1 else 'was'} started; use torchrun "
            f"--nproc-per-node {needed}, or change pp.size"
        )


def flatten(config: Config) -> dict[str, Any]:
    """Full name -> value of every key, `{"pp.size": 4, ...}`, in the order of `keys`."""
    # Any: the values of TOML, and None for a key without a value.
    tables = msgspec.to_builtins(config)
    dims = tables["model"].pop("dims")
    tables["model"] |= {name: dims[name] for name in dims if name not in TRAIN_KEYS_OF_DIMS}
    return _flatten(tables, "")


def digest(config: Config) -> str:
    """64 hex digits that are equal on two ranks just when their configs are."""
    return hashlib.sha256(msgspec.json.encode(flatten(config), order="deterministic")).hexdigest()


def dumps(config: Config) -> str:
    """The config as TOML, every key that has a value; `load` of that text gives the same config."""
    lines: list[str] = []
    section = ""
    for key, value in flatten(config).items():
        table, _, name = key.rpartition(".")
        if value is None:
            continue
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        # JSON's texts, numbers and lists are TOML's too.
        lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines[1:]) + "\n"


def _flatten(table: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        # Sections are tables, and they alone: no built option has a table for a value.
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
