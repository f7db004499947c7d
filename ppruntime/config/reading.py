"""Collects the values of a config and everything wrong with them, and knows who set what."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ppruntime.config.errors import (
    COMMAND_LINE,
    ConfigError,
    Mistake,
    Place,
    convert,
    did_you_mean,
    show,
    wrong_value,
)
from ppruntime.config.keys import TRAIN_KEYS_OF_DIMS, Config, Model, Section
from ppruntime.config.rules import broken_rules
from ppruntime.config.toml_places import KeyPath, key_lines
from ppruntime.models.dims import ModelDims, changed, preset
from ppruntime.models.presets import PRESETS

_LARGEST_FILE_BYTES = 1 << 20  # a config is a page of text; more is a mistake or an attack
_UNSET = "default"
_STAND_IN = "tiny"  # the model of a config that names none, while its other mistakes are sought


@dataclass
class Reading:
    """The values so far, the place that set each, and the mistakes found.

    Call `add_file` and `add_override` in the order in which they win, then `config`.
    """

    # Any, here and below: whatever TOML can hold, until a struct's field has checked it.
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)
    wrong_keys: set[str] = field(default_factory=set)
    """Full names of keys whose value was refused: no rule may look at them."""
    nobody: Place = field(default_factory=lambda: Place(COMMAND_LINE))
    """The place of a value that nobody set: the first file."""
    is_broken: bool = False
    """Whether a file could not be read at all, so that its values are missing."""

    def add_file(self, path: Path) -> None:
        """Lays the file's values over those there: tables key by key, others as a whole."""
        source = str(path)
        if self.nobody.source == COMMAND_LINE:
            self.nobody = Place(source, 1)
        try:
            text = _read(path)
            table = tomllib.loads(text)
            lines = key_lines(text)
        except OSError as error:
            self.mistakes.append(Mistake(Place(source), _no_file(path, error)))
            self.is_broken = True
        except (ValueError, RecursionError) as error:
            self.mistakes.append(_no_toml(source, error))
            self.is_broken = True
        else:
            self.places |= {path: Place(source, line) for path, line in lines.items()}
            _overlay(self.values, table)

    def add_override(self, text: str) -> None:
        """Lays `section.key=value` over the values that are there."""
        name, equals, value = (part.strip() for part in text.partition("="))
        path = tuple(part.strip() for part in name.split("."))
        if not equals or len(path) < 2 or not all(path):
            words = "is not an override; write section.key=value, such as pp.size=2"
            self.mistakes.append(Mistake(Place(COMMAND_LINE), f"{show(text)} {words}"))
            return
        self.places |= {path[:n]: Place(COMMAND_LINE) for n in range(1, len(path) + 1)}
        key_type = _key_types(path[:-1]).get(path[-1])
        table: Any = None if value == _UNSET else _override_value(value, key_type)
        for part in reversed(path):
            table = {part: table}
        _overlay(self.values, table)

    def config(self) -> Config:
        """The values as structs. Raises ConfigError with all mistakes if there is one."""
        if self.is_broken:
            self._raise()
        sections = _fields(Config)
        made: dict[str, Any] = {}
        for name, value in ({"model": {}} | self.values).items():
            if name == "model":
                made[name] = self._model(value)
            elif name in sections:
                made[name] = self._section(sections[name], value, (name,))
            else:
                self._complain((name,), _no_section(name))
        config = Config(**made)
        in_dims = {name: getattr(config.train, name) for name in TRAIN_KEYS_OF_DIMS}
        dims = replace(config.model.dims, **in_dims)
        config = replace(config, model=replace(config.model, dims=dims))
        for key, text in broken_rules(config, self.wrong_keys):
            self._complain(tuple(key.split(".")), text)
        if self.mistakes:
            self._raise()
        return config

    def _raise(self) -> None:
        in_file_order = sorted(self.mistakes, key=lambda mistake: mistake.place)
        raise ConfigError("\n".join(map(str, in_file_order)))

    def _complain(self, path: KeyPath, text: str) -> None:
        """Records a mistake at the place that set `path`, else its section, else the first file."""
        while path and path not in self.places:
            path = path[:-1]
        self.mistakes.append(Mistake(self.places.get(path, self.nobody), text))

    def _refuse(self, path: tuple[str, ...], text: str) -> None:
        self._complain(path, text)
        self.wrong_keys.add(".".join(path))

    def _section(self, section_type: type[Section], table: Any, path: tuple[str, ...]) -> Section:
        """A struct of the table's values; a wrong one is recorded and takes its default."""
        return section_type(**self._values(_fields(section_type), table, path))

    def _model(self, table: Any) -> Model:
        """`name` picks the preset, every other key replaces a field of it."""
        values = self._values(_key_types(("model",)), table, ("model",))
        name = values.pop("name", None)
        if name not in PRESETS:
            known = ", ".join(map(show, PRESETS))
            if name is not None:
                text = f"model.name = {show(name)} is not a model; expected one of {known}"
                self._refuse(("model", "name"), text + did_you_mean(name, PRESETS))
            elif not self.wrong_keys & {"model", "model.name"}:
                self._refuse(("model", "name"), f"model.name is missing; write one of {known}")
            name = _STAND_IN
        if any(key.startswith("model") for key in self.wrong_keys):
            self.wrong_keys.add("model")  # whatever is asked of the dims, the answer is in doubt
        return Model(name=name, dims=changed(preset(name), **values))

    def _values(
        self, types: Mapping[str, Any], table: Any, path: tuple[str, ...]
    ) -> dict[str, Any]:
        """The table's values, each as its field's type has it; refused ones are left out."""
        section = ".".join(path)
        if table is None:
            return {}  # taken back by `default`
        if not isinstance(table, dict):
            words = f"is not allowed; {section} is a section of keys"
            self._refuse(path, f"{section} = {show(table)} {words}")
            return {}
        values: dict[str, Any] = {}
        for name, value in table.items():
            key_type = types.get(name)
            if key_type is None:
                self._complain((*path, name), _no_key(f"{section}.{name}", types))
            elif isinstance(key_type, type) and issubclass(key_type, Section):
                values[name] = self._section(key_type, value, (*path, name))
            elif value is not None:
                try:
                    values[name] = convert(value, key_type)
                except msgspec.ValidationError:
                    text = wrong_value(f"{section}.{name}", value, key_type)
                    self._refuse((*path, name), text)
        return values


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_LARGEST_FILE_BYTES + 1)
    if len(data) > _LARGEST_FILE_BYTES:
        raise ValueError(f"the file has more than {_LARGEST_FILE_BYTES} bytes")
    return data.decode()


def _no_file(path: Path, error: OSError) -> str:
    """Why a file cannot be read, with the nearest name beside it."""
    near: list[str] = []
    if isinstance(error, FileNotFoundError) and path.parent.is_dir():
        names = [p.name for p in path.parent.glob("*.toml")]
        near = difflib.get_close_matches(path.name, names, n=1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else ""
    return f"cannot be read: {error.strerror or error}{hint}"


def _no_toml(source: str, error: Exception) -> Mistake:
    """tomllib's words, with the line in front where it says one."""
    if isinstance(error, RecursionError):
        return Mistake(Place(source, 1), "not legal TOML: nested too deeply")
    words, line, column = str(error), 1, ""
    if match := re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", words, re.DOTALL):
        words, line, column = match[1], int(match[2]), f" (column {match[3]})"
    return Mistake(Place(source, line), f"not legal TOML: {words}{column}")


def _overlay(under: dict[str, Any], over: dict[str, Any]) -> None:
    """Puts the values of `over` into `under`: tables key by key, anything else as a whole."""
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(name), dict):
            _overlay(under[name], value)
        else:
            under[name] = value


def _override_value(text: str, key_type: Any) -> Any:
    """`text` as TOML; as a plain text where it is no TOML, or where the key only takes texts."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    for candidate in (table["value"], text):
        try:
            convert(candidate, key_type)
        except msgspec.ValidationError:
            continue
        return candidate
    return table["value"]


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Name -> type, with its ranges, of a struct's fields."""
    return {f.name: f.type for f in msgspec.structs.fields(struct)}


def _key_types(path: tuple[str, ...]) -> dict[str, Any]:
    """Name -> type of the keys in the section at `path`; empty if there is no such section."""
    if path == ("model",):
        dims = _fields(ModelDims)
        return {"name": str} | {n: dims[n] for n in dims if n not in TRAIN_KEYS_OF_DIMS}
    types = _fields(Config)
    for name in path:
        section = types.get(name)
        if not (isinstance(section, type) and issubclass(section, Section)):
            return {}
        types = _fields(section)
    return types


def _no_section(name: str) -> str:
    sections = _fields(Config)
    owner = next((s for s in sections if name in _key_types((s,))), None)
    if owner is not None:
        return f"{name} is not a section, it is a key of [{owner}]; write {owner}.{name}"
    hint = did_you_mean(name, sections)
    return f"{name} is not a section; expected one of {', '.join(sections)}{hint}"


def _no_key(key: str, known: Mapping[str, Any]) -> str:
    section, _, name = key.rpartition(".")
    if section == "model" and name in TRAIN_KEYS_OF_DIMS:
        return f"{key} is not a key; write train.{name}"
    hint = did_you_mean(name, known) or f"; [{section}] has {', '.join(known)}"
    return f"{key} is not a key{hint}"
