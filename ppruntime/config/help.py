"""What every config key means, for `ppruntime keys`: the text under each field of `keys`."""

from __future__ import annotations

import ast
import inspect
import typing
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from ppruntime.config import keys as config_keys
from ppruntime.config.errors import describe, show
from ppruntime.config.keys import TRAIN_KEYS_OF_DIMS, Config, Section
from ppruntime.models import dims
from ppruntime.models.dims import ModelDims


@dataclass(frozen=True, slots=True)
class KeyHelp:
    """One key of a config file."""

    name: str
    """In full: `pp.size`."""
    takes: str
    """Type, range or choices, in words."""
    default: str
    """As TOML writes it; empty for a key that needs a value, or whose text tells the default."""
    text: str

    def __str__(self) -> str:
        default = f" (default {self.default})" if self.default else ""
        return f"{self.name}: {self.takes}{default}\n    {self.text}"


def key_helps() -> tuple[KeyHelp, ...]:
    """Every key, in the order of `keys`; the model's sizes first."""
    names = [f.name for f in msgspec.structs.fields(ModelDims) if f.name not in TRAIN_KEYS_OF_DIMS]
    sizes = {help.name: help for help in _of_struct(ModelDims, _texts(dims), "model.")}
    keys = _of_struct(Config, _texts(config_keys), "")
    preset = next(key for key in keys if key.name == "model.name")
    return (preset, *(sizes[f"model.{name}"] for name in names), *(k for k in keys if k != preset))


def kernels_left_to_auto(*, but: Collection[str] = ()) -> tuple[str, ...]:
    """`kernels.NAME=auto` for every key of `[kernels]` that takes it, save those in `but`."""
    choices = typing.get_type_hints(config_keys.Kernels)
    names = [name for name, choice in choices.items() if "auto" in typing.get_args(choice)]
    return tuple(f"kernels.{name}=auto" for name in names if name not in but)


def _of_struct(
    struct: type[msgspec.Struct], texts: dict[tuple[str, str], str], prefix: str
) -> list[KeyHelp]:
    helps: list[KeyHelp] = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            helps += _of_struct(field.type, texts, f"{prefix}{field.name}.")
        elif field.type is not ModelDims:
            takes = describe(msgspec.inspect.type_info(field.type))
            text = texts.get((struct.__name__, field.name), "")
            helps.append(KeyHelp(prefix + field.name, takes, _default(field.default), text))
    return helps


def _default(value: Any) -> str:
    # Any: whatever a field's default is; None stands for what the text says.
    return "" if value is msgspec.NODEFAULT or value is None else show(value)


def _texts(module: Any) -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands under the field in the module's source."""
    texts: dict[tuple[str, str], str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, under in zip(node.body, node.body[1:], strict=False):
            match field, under:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[node.name, name] = " ".join(text.split())
    return texts
