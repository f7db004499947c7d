"""TOML files and command-line overrides -> one checked `Config`.

Start at `load`. The keys are in `config_keys.py`, the rules between keys in `config_rules.py`, the
collecting of values and mistakes in `config_reading.py`. A config that cannot be run is refused here,
before anything starts, with every mistake that it has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ppruntime.config_errors import ConfigError
from ppruntime.config_keys import TRAIN_KEYS_OF_DIMS, Config
from ppruntime.config_reading import Reading
from ppruntime.config_rules import broken_rules

__all__ = ["Config", "ConfigError", "check_world_size", "digest", "dumps", "flatten", "load"]


def load(paths: Sequence[str | Path], overrides: Sequence[str] = ()) -> Config:
    """The config that `paths` give in order, later files first, and `section.key=value` texts on top.

    An override's value is TOML; a bare word is a text; the word `default` takes back what files set.
    Raises ConfigError with all mistakes, each with the place that set the value.
    """
    reading = Reading()
    for path in paths:
        reading.add_file(Path(path))
    for override in overrides:
        reading.add_override(override)
    reading.stop_if_wrong()
    config = reading.config()
    for key, text in broken_rules(config, reading.is_set):
        reading.complain(tuple(key.split(".")), text)
    reading.stop_if_wrong()
    return config


def check_world_size(config: Config, num_processes: int) -> None:
    """Raises ConfigError unless the run was started with the number of processes that it needs."""
    if num_processes == config.world_size:
        return
    needed = f"{config.world_size} process" + ("es" if config.world_size > 1 else "")
    started = "1 was" if num_processes == 1 else f"{num_processes} were"
    raise ConfigError(
        f"pp.size {config.pp.size} x parallel.dp {config.parallel.dp} x parallel.ep "
        f"{config.parallel.ep} needs {needed}, but {started} started; "
        f"use torchrun --nproc-per-node {config.world_size} or change pp.size"
    )


def flatten(config: Config) -> dict[str, Any]:
    """Every key's value under its full name, `{"pp.size": 4, ...}`, in the order of `config_keys`."""
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
        # Sections are tables, and only they: a key that is a table itself would have to be told apart.
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat
