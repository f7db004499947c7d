"""What comes from neighbours that do not exist: drawn, or what an earlier job recorded.

Whoever multiplies must not be given zeros, on which kernels run too fast. Drawn tensors give the
true times of products, but experts are chosen and keys selected by what numbers say: for those an
emulation goes on where another one left off, on the tensors that its last stage handed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ppruntime.projection.projector import ProjectionError
from ppruntime.transports.base import Boundary, Channel

_DRAWN = "; what came from absent stages was drawn"


class Replays(Protocol):
    """What crosses at the edges."""

    def tensors(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        """What the absent neighbour hands on, on the stage's device."""

    def sent(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Something left for an absent neighbour; the tensors may be kept, not written to."""


class Blanks:
    """Replays that repeat `seed`-drawn tensors: small normal numbers, and zeros where integers or
    flags cross. Keeps nothing of what is sent."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device, self._seed = device, seed
        self._made: dict[int, tuple[Tensor, ...]] = {}

    def tensors(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        if channel.id not in self._made:
            self._made[channel.id] = drawn(channel.boundary, self._seed + channel.id, self._device)
        return self._made[channel.id]

    def sent(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        pass

    def describe(self) -> str:
        """As `Recorder.describe`."""
        return _DRAWN if self._made else ""


class Recorder:
    """Replays that keep what leaves at an edge, and hand on what an earlier job kept there.

    A file per edge and micro-batch in `folder`: `forward-7-0.pt` is what stage 7 handed on of
    micro-batch 0. The first `keep` micro-batches are kept and repeat. Where there is no file the
    tensors are drawn, see `drawn`. All is written and read in an emulation's first step, which is
    not measured.
    """

    def __init__(self, folder: Path, keep: int, data_rank: int, device: torch.device) -> None:
        self._folder, self._keep, self._device = folder, keep, device
        self._suffix = f"-rank{data_rank}" if data_rank else ""
        self._loaded: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._written: set[Path] = set()
        self._num_recorded = self._num_drawn = 0

    def tensors(self, channel: Channel, micro_batch: int) -> tuple[Tensor, ...]:
        key = (channel.id, micro_batch % self._keep)
        if key not in self._loaded:
            path = self._path(channel, key[1])
            if path.is_file():
                self._loaded[key] = self._read(path, channel)
                self._num_recorded += 1
            else:
                self._loaded[key] = drawn(channel.boundary, channel.id, self._device)
                self._num_drawn += 1
        return self._loaded[key]

    def describe(self) -> str:
        """What came over the edges so far, as a clause of a row's source."""
        both = self._num_recorded + self._num_drawn
        if not both:
            return ""
        if not self._num_drawn:
            return "; what came from absent stages was recorded"
        if not self._num_recorded:
            return _DRAWN
        return f"{_DRAWN}, {self._num_recorded} of {both} boundaries apart"

    def sent(self, channel: Channel, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        path = self._path(channel, micro_batch)
        if micro_batch < self._keep and path not in self._written:
            self._written.add(path)
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save([tensor.detach().cpu() for tensor in tensors], path)

    def _path(self, channel: Channel, micro_batch: int) -> Path:
        return self._folder / f"{channel.kind}-{channel.src_stage}-{micro_batch}{self._suffix}.pt"

    def _read(self, path: Path, channel: Channel) -> tuple[Tensor, ...]:
        found = torch.load(path, weights_only=True)
        here = [(tuple(t.shape), t.dtype) for t in found]
        wanted = [(spec.shape, spec.dtype) for spec in channel.boundary.tensors]
        if here != wanted:
            raise ProjectionError(
                f"{path} holds {here}, {channel} carries {wanted}; it is of another run, delete it "
                "or name another folder"
            )
        return tuple(t.to(self._device) for t in found)


def drawn(boundary: Boundary, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of a boundary's shapes. Never all zeros where numbers are multiplied, since kernels
    run too fast on these."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(spec.shape, generator=generator).to(device=device, dtype=spec.dtype)
        if spec.dtype.is_floating_point
        else torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for spec in boundary.tensors
    )
