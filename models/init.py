"""Initial values that depend on (seed, full name) alone: the same on every cut and rank, and on
every device unless they are drawn there."""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor, nn

from ppruntime.models.router import Router

ROWS_PER_PIECE = 1 << 16
"""Rows of a large matrix that share one generator, so that a rank can draw its own rows alone."""

_ZEROS = ("base", "sink", "position_bias")
_ONES = ("scale", "engram.query", "engram.key")


def init_parameters(
    unit: nn.Module, prefix: str, seed: int, std: float = 0.02, *, draw_on_device: bool = False
) -> None:
    """Fills a unit's parameters and buffers in place. `prefix` is the unit's name (`spec.name`).

    Matrices are N(0, std). Norm weights, mHC scales and Engram's gate weights are 1; sinks, mHC
    offsets, position biases and routing biases 0. Values are drawn in fp32 on the CPU, or with
    `draw_on_device` where the parameters lie: a GPU's differ from a CPU's and take no time, where a
    CPU needs ten seconds for a billion.
    """
    with torch.no_grad():
        for path, module in unit.named_modules(prefix=prefix):
            first_row = getattr(module, "first_row", 0)  # of the experts, where others hold some
            for name, parameter in module.named_parameters(path, recurse=False):
                constant = _constant(name)
                if constant is None:
                    fill_normal(
                        parameter, name, seed, std, first_row=first_row, on_device=draw_on_device
                    )
                else:
                    parameter.fill_(constant)
            _reset_buffers(module, path, seed)


def fill_normal(
    rows: Tensor,
    full_name: str,
    seed: int,
    std: float,
    *,
    first_row: int = 0,
    on_device: bool = False,
) -> None:
    """Fills rows first_row, first_row + 1, ... of the parameter `full_name` with its N(0, std).

    A parameter with three axes (experts, groups) has one generator per entry of the first axis, one
    with two has one per 65,536 rows: any piece can be drawn without the others.
    """
    step = 1 if rows.dim() == 3 else ROWS_PER_PIECE
    stop_row = first_row + rows.shape[0]
    for piece in range(first_row // step, -(-stop_row // step)):
        start, stop = max(piece * step, first_row), min((piece + 1) * step, stop_row)
        shape = (stop - piece * step, *rows.shape[1:])
        device = rows.device if on_device else torch.device("cpu")
        drawn = torch.empty(shape, dtype=torch.float32, device=device).normal_(
            std=std, generator=_generator(seed, f"{full_name}/{piece}", device)
        )
        rows[start - first_row : stop - first_row].copy_(drawn[start - piece * step :])


def _constant(name: str) -> float | None:
    """The value that a parameter starts with throughout; None: it is drawn."""
    if name.endswith("norm.weight") or name.endswith(_ONES):
        return 1.0
    return 0.0 if name.endswith(_ZEROS) else None


def _reset_buffers(module: nn.Module, full_name: str, seed: int) -> None:
    if isinstance(module, Router):
        if module.by_token_id:
            module.reset_table(_generator(seed, f"{full_name}.experts_of_token"))
        else:
            module.bias.zero_()
        return
    reset = getattr(module, "reset_buffers", None)
    if reset is not None:
        reset()


def _generator(seed: int, text: str, device: torch.device | str = "cpu") -> torch.Generator:
    digest = sha256(f"{seed}/{text}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
