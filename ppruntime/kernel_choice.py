"""`[kernels]` -> who computes attention's operations on this device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ppruntime.config.errors import ConfigError, show
from ppruntime.config.keys import Config
from ppruntime.models.kernel_limits import AttentionOp, Backend
from ppruntime.models.kernels.attention_backends import (
    Choice,
    Target,
    fastest,
    unavailable_reason,
)


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """A backend for each operation."""

    choice: Choice
    note: str
    """What "auto" became, in a sentence; empty if nothing was left to it."""


def choose_kernels(config: Config, device: torch.device) -> KernelChoice:
    """The backends that the config names, or the fastest ones that run on `device` where it says
    auto. Raises ConfigError, with all mistakes, where a named one cannot run."""
    kernels, dims = config.kernels, config.model.dims
    dtype = torch.float32 if config.train.precision == "fp32" else torch.bfloat16
    target = Target(dims, dtype, device)
    chosen: dict[AttentionOp, Backend] = {}
    mistakes: list[str] = []
    notes: list[str] = []
    for op in AttentionOp:
        name: str = getattr(kernels, op.value)
        if name == "auto":
            chosen[op] = fastest(op, target, deterministic=kernels.attention_deterministic)
            notes.append(f"{op.value} {chosen[op].value}")
            continue
        chosen[op] = Backend(name)
        reason = unavailable_reason(op, chosen[op], target)
        if reason is not None:
            mistakes.append(
                f"kernels.{op.value} = {show(name)} cannot run here: {reason}; use "
                '"reference" or "auto"'
            )
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    choice = Choice(
        attention=chosen[AttentionOp.ATTENTION],
        indexer=chosen[AttentionOp.INDEXER],
        rope=chosen[AttentionOp.ROPE],
        grouped_output=chosen[AttentionOp.GROUPED_OUTPUT],
        norm=chosen[AttentionOp.NORM],
        compressor=chosen[AttentionOp.COMPRESSOR],
        deterministic=kernels.attention_deterministic,
    )
    return KernelChoice(choice, f"kernels: auto chose {', '.join(notes)}" if notes else "")
