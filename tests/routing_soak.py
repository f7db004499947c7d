"""A fused MoE layer through many routings under checkers of its memory: for ranks that one process
plays and for ranks on GPUs.

Everything that a step allocates lies between guards and is filled with another byte every time, and
so do the arena's regions and the weights' gradients lie: a write outside of them is seen at the end
of the step, a read of what nobody wrote as a result that differs when its routing comes again.
Import it before any kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fp8_cases import distance
from torch.utils._python_dispatch import TorchDispatchMode

from ppruntime.models.experts import Experts
from ppruntime.models.fp8_experts import Fp8Experts
from ppruntime.models.mega_moe import MegaMoe, bf16_weight_grads
from ppruntime.models.mega_moe_rules import ArenaShape
from ppruntime.models.weight_copies import WeightVersion, set_weight_version

GUARD = 4096
"""Bytes on each side: what is guarded stays aligned as the allocator aligns."""
CANARY = 0xA5
FILLS = (0xFF, 0x00, 0x7F)
"""NaN or -1, zero, and very large numbers or NaN."""
NAMES = ("y", "dx", "dp", "dW13", "dW2")
REGIONS = ("words", "error", "told", "order", "weights", "scales", "values", "rows", "places")

aten = torch.ops.aten
FACTORIES = {
    aten.empty.memory_format: False,
    aten.empty_strided.default: False,
    aten.empty_like.default: False,
    aten.new_empty.default: False,
    aten.new_empty_strided.default: False,
    aten.zeros.default: True,
    aten.zeros_like.default: True,
    aten.new_zeros.default: True,
}
"""Whether what they give is zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedShape(ArenaShape):
    """An arena whose regions have guards before, between and behind them."""

    def offset(self, region: str) -> int:
        return ArenaShape.offset(self, region) + GUARD * (1 + REGIONS.index(region))

    @property
    def num_bytes(self) -> int:
        return ArenaShape.offset(self, "") + GUARD * (1 + len(REGIONS))

    def guards(self) -> list[tuple[str, int]]:
        """What lies behind each guard, and where that guard begins."""
        named = [(f"before {name}", self.offset(name) - GUARD) for name in REGIONS]
        return [*named, ("behind the arena", self.num_bytes - GUARD)]


class Guards(TorchDispatchMode):
    """While it is entered, memory of `device` that torch hands out lies between guards. It stays
    until `broken` has looked at them."""

    def __init__(self, device: str, fill: int) -> None:
        super().__init__()
        self._device, self._fill = device, fill
        self._made: list[tuple[str, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_zeros = FACTORIES.get(func)
        if is_zeros is None or out.device.type != self._device or not out.numel():
            return out
        if not out.is_contiguous() or out.is_pinned():
            return out
        return self.guarded(out.shape, out.dtype, out.device, zeros=is_zeros)

    def guarded(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, zeros: bool
    ) -> torch.Tensor:
        """A tensor between guards."""
        num = dtype.itemsize * torch.Size(shape).numel()
        raw = torch.empty(num + 2 * GUARD, dtype=torch.uint8, device=device)
        raw.fill_(CANARY)
        inner = raw[GUARD : GUARD + num]
        inner.fill_(0 if zeros else self._fill)
        self._made.append((f"{dtype} {list(shape)}", raw))
        return inner.view(dtype).view(shape)

    @property
    def num_made(self) -> int:
        return len(self._made)

    def broken(self, *, keep: bool = False) -> list[str]:
        """Tensors next to which somebody wrote. Lets go of all, unless they are to be kept."""
        made = self._made
        if not keep:
            self._made = []
        if not made:
            return []
        guards = torch.cat([part for _, raw in made for part in (raw[:GUARD], raw[-GUARD:])])
        bad = (guards.view(-1, GUARD) != CANARY).any(1)
        if not bad.any():
            return []
        sides = ("before", "behind")
        return [f"{sides[i % 2]} {made[i // 2][0]}" for i in bad.nonzero().flatten().tolist()]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a layer and its micro-batches."""

    num_tokens: int
    per_token: int
    num_experts: int
    hidden: int

    @property
    def shape(self) -> GuardedShape:
        return GuardedShape(
            most_tokens=self.num_tokens,
            per_token=self.per_token,
            num_experts=self.num_experts,
            hidden=self.hidden,
        )


KINDS = (
    "random",
    "one expert in every token",
    "all to one expert",
    "none to the second rank",
    "none to the first rank",
    "some pairs nowhere",
    "tokens on one rank",
    "one token",
    "no tokens at all",
)


def routing(kind: str, seed: int, rank: int, sizes: Sizes) -> torch.Tensor:
    """int64 [tokens, K] on the CPU; -1: nowhere. Ranks have different ones of one kind and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    num, experts = sizes.num_tokens, sizes.num_experts
    if kind == "tokens on one rank" and rank != seed % 2:
        num = 0
    num = {"one token": 1, "no tokens at all": 0}.get(kind, num)
    if kind == "random" and seed % 2:
        num = int(torch.randint(1, num + 1, (), generator=generator))
    scores = torch.rand(num, experts, generator=generator)
    hot = seed % experts
    if kind in ("one expert in every token", "all to one expert"):
        scores[:, hot] = 2
    if kind == "none to the second rank":
        scores[:, : experts // 2] += 1
    if kind == "none to the first rank":
        scores[:, experts // 2 :] += 1
    picked = scores.topk(sizes.per_token).indices
    if kind == "all to one expert":
        return torch.where(picked == hot, picked, -1)
    if kind == "some pairs nowhere":
        return picked.masked_fill(torch.rand(picked.shape, generator=generator) < 0.4, -1)
    return picked


def batch(
    kind: str, seed: int, rank: int, sizes: Sizes, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """x, experts, weights and the gradient of y of one rank."""
    experts = routing(kind, seed, rank, sizes)
    generator = torch.Generator().manual_seed(7 + 1000 * seed + rank)
    num = len(experts)
    x = torch.randn(num, sizes.hidden, generator=generator).bfloat16()
    weights = torch.rand(num, sizes.per_token, generator=generator) + 0.1
    grad = torch.randn(num, sizes.hidden, generator=generator)
    return tuple(t.to(device) for t in (x, experts, weights, grad))


class Soak:
    """Ranks, as many as this process has, with a layer each, step by step. `run` runs one pass of
    each of them, see `mega_cases.run_together`."""

    def __init__(
        self,
        ranks: Sequence[MegaMoe],
        layers: Sequence[Experts | Fp8Experts],
        run: Callable[[Sequence[MegaMoe], Sequence[Any]], list[Any]],
        sizes: Sizes,
    ) -> None:
        self.ranks, self.layers, self.run, self.sizes = ranks, layers, run, sizes
        self.device = ranks[0].arena.error.device
        self.wrong: list[str] = []
        self.num_guarded = 0
        self._known: dict[tuple[str, int], list[list[torch.Tensor]]] = {}
        self._allocated: int | None = None
        self._sums = Guards(self.device.type, 0)
        for rank, layer in zip(ranks, layers, strict=True):
            set_weight_version(layer, WeightVersion())
            for weight in layer.parameters():
                weight.grad_dtype = torch.float32
                weight.grad = self._sums.guarded(
                    weight.shape, torch.float32, self.device, zeros=True
                )
            if isinstance(layer, Fp8Experts):
                layer.quantized()
            for _, start in _shape(rank).guards():
                rank.arena._memory[start : start + GUARD] = CANARY

    def steps(self, num_steps: int, num_routings: int) -> None:
        """So many, a few routings again and again; what is wrong goes to `wrong`, by step."""
        for step in range(num_steps):
            which = step % num_routings
            kind, seed = KINDS[which % len(KINDS)], which // len(KINDS)
            if step % 7 == 3:  # a pool that is too small is filled again
                for rank, layer in zip(self.ranks, self.layers, strict=True):
                    if rank.exchange.rank == 0:
                        rank.rooms[rank.layer_of(layer)] = 128
            self._step(step, kind, seed)
            if step == 2 * num_routings:  # all kernels and results are there
                self._allocated = self._bytes()
            self._check_bytes(f"step {step}, {kind}")
            if len(self.wrong) > 40:
                return

    def _check_bytes(self, where: str) -> None:
        """That as much is allocated as when everything was there."""
        if self._allocated is None or self._bytes() == self._allocated:
            return
        gc.collect()  # what refers to itself may wait for it
        if (now := self._bytes()) != self._allocated:
            self.wrong.append(f"{where}: {now} bytes allocated, not {self._allocated}")
            self._allocated = now

    def _bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _step(self, step: int, kind: str, seed: int) -> None:
        where = f"step {step}, {kind}, seed {seed}"
        batches = [
            batch(kind, seed, rank.exchange.rank, self.sizes, self.device) for rank in self.ranks
        ]
        guards = Guards(self.device.type, FILLS[step % len(FILLS)])
        results = self._results(batches, guards)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.num_guarded += guards.num_made
        found = [*guards.broken(), *self._sums.broken(keep=True)]
        for rank in self.ranks:
            name = f"of rank {rank.exchange.rank}'s arena"
            for text, start in _shape(rank).guards():
                if (rank.arena._memory[start : start + GUARD] != CANARY).any():
                    found.append(f"{text} {name}")
        self.wrong += [f"{where}: written {text}" for text in found]
        for rank, mine in zip(self.ranks, results, strict=True):
            for name, result in zip(NAMES, mine, strict=True):
                if not result.isfinite().all():
                    self.wrong.append(f"{where}, rank {rank.exchange.rank}: {name} is not finite")
        known = self._known.setdefault((kind, seed), results)
        for rank, mine, before in zip(self.ranks, results, known, strict=True):
            for name, result, other in zip(NAMES, mine, before, strict=True):
                if not torch.equal(result, other):
                    self.wrong.append(
                        f"{where}, rank {rank.exchange.rank}: {name} is"
                        f" {distance(result, other):.1e} from what it was"
                    )

    def _results(
        self, batches: Sequence[tuple[torch.Tensor, ...]], guards: Guards
    ) -> list[list[torch.Tensor]]:
        """y and gradients of each rank here, in memory of their own."""
        copies: list[Any] = []
        for layer in self.layers:
            fp8 = isinstance(layer, Fp8Experts)
            pair = layer.gate_up.weight.detach(), layer.down.weight.detach()
            copies.append(layer.quantized() if fp8 else pair)
            for weight in layer.parameters():
                weight.grad.zero_()
        with torch.no_grad(), guards:
            passes = []
            for rank, layer, copy, one in zip(
                self.ranks, self.layers, copies, batches, strict=True
            ):
                fp8 = isinstance(layer, Fp8Experts)
                matrices = (copy.gate_up, copy.down) if fp8 else copy
                passes.append(
                    rank.forward_steps(
                        *one[:3], matrices, float(layer.limit), power_of_two=fp8,
                        layer=rank.layer_of(layer),
                    )
                )  # fmt: skip
            forwards = self.run(self.ranks, passes)
            passes = []
            for rank, layer, copy, (_, kept), (*_, grad) in zip(
                self.ranks, self.layers, copies, forwards, batches, strict=True
            ):
                fp8 = isinstance(layer, Fp8Experts)
                passes.append(
                    rank.backward_steps(
                        grad.bfloat16() if fp8 else grad, kept, copy, float(layer.limit),
                        dtype=torch.bfloat16, tile_scales=False,
                    )
                )  # fmt: skip
            grads = self.run(self.ranks, passes)
            for layer, one in zip(self.layers, grads, strict=True):
                if isinstance(layer, Fp8Experts):
                    layer.put_weight_grads(one.operands)
                else:
                    bf16_weight_grads(layer, one.operands, layer.gate_up.weight, layer.down.weight)
        return [
            [
                t.clone()
                for t in (y, one.x_ND, one.weights_NK, *(w.grad for w in layer.parameters()))
            ]
            for (y, _), one, layer in zip(forwards, grads, self.layers, strict=True)
        ]


def _shape(rank: MegaMoe) -> GuardedShape:
    shape = rank.arena.shape
    assert isinstance(shape, GuardedShape)
    return shape
