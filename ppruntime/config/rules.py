"""What has to hold between the keys of a config.

Rules of pipeline, experts, kernels and training stand in `*_rules.py`; here are those of the
model and of paths, and how all are asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from contextlib import suppress
from functools import reduce
from typing import Any, cast

from ppruntime.config.errors import show
from ppruntime.config.expert_rules import EXPERT_RULES
from ppruntime.config.kernel_rules import KERNEL_RULES
from ppruntime.config.keys import Config, Section
from ppruntime.config.pipeline_rules import PIPELINE_RULES
from ppruntime.config.rule import Broken, Rule
from ppruntime.config.training_rules import TRAINING_RULES
from ppruntime.models.dims import preset, validate

_MOST_LAYERS = 4096
_LARGEST_SIZE = 2**31 - 1


def broken_rules(config: Config, wrong_keys: Set[str]) -> Iterator[Broken]:
    """The rules that `config` breaks.

    Keys in `wrong_keys` were refused and have made-up values: a rule that reads one says nothing.
    """
    guarded = cast(Config, _Guard(config, wrong_keys))
    for rule in _RULES:
        with suppress(_InDoubt):
            yield from rule(guarded)


class _InDoubt(Exception):
    """A rule has read a key whose value was refused."""


class _Guard:
    """A section of a config, or all of it, in which reading a refused key ends the rule."""

    def __init__(self, section: Section, wrong_keys: Set[str], prefix: str = "") -> None:
        self._section, self._wrong_keys, self._prefix = section, wrong_keys, prefix

    def __getattr__(self, name: str) -> Any:
        key = self._prefix + name
        if key in self._wrong_keys:
            raise _InDoubt
        kind = getattr(type(self._section), name)
        if isinstance(kind, property):
            assert kind.fget is not None
            return kind.fget(self)  # so that what the property reads is guarded too
        value = getattr(self._section, name)
        return _Guard(value, self._wrong_keys, f"{key}.") if isinstance(value, Section) else value


def _model(config: Config) -> Iterator[Broken]:
    dims, usual = config.model.dims, preset(config.model.name)
    names = dims.__struct_fields__
    sizes = {name: size for name in names if type(size := getattr(dims, name)) is int}
    bounds = dict.fromkeys(sizes, _LARGEST_SIZE) | {"num_layers": _MOST_LAYERS}
    too_large = [
        f"{name} is {sizes[name]}; it has to be at most {bounds[name]}"
        for name in sizes
        if sizes[name] > bounds[name]
    ]
    for text in too_large or validate(dims):
        # To blame is the first size in the sentence that is not the preset's.
        sizes_named = [word for word in re.findall(r"\w+", text) if word in names]
        changed = (n for n in sizes_named if getattr(dims, n) != getattr(usual, n))
        blamed = next(changed, "name")
        yield f"model.{blamed}", f"model: {text}"


def _timeline(config: Config) -> Iterator[Broken]:
    step, steps = config.run.timeline_step, config.train.steps
    if step is not None and step >= steps:
        yield (
            "run.timeline_step",
            f"run.timeline_step = {step} is never reached, steps are numbered 0 to {steps - 1}; "
            "leave it out for the last one",
        )


def _paths(config: Config) -> Iterator[Broken]:
    for key in ("run.dir", "data.path", "pp.nccl_library"):
        path: str | None = reduce(getattr, key.split("."), config)  # type: ignore[assignment]
        if path is not None and not (path and path.isprintable()):
            words = "is not a path; it is empty or has unprintable characters"
            yield key, f"{key} = {show(path)} {words}"


_RULES: tuple[Rule, ...] = (
    _model,
    *PIPELINE_RULES,
    *EXPERT_RULES,
    *KERNEL_RULES,
    *TRAINING_RULES,
    _timeline,
    _paths,
)
