"""The MoE half of a layer on one device, whole: `bench layers --only moe --out FILE`.

mHC, norm, router over all experts, routed and shared experts, write-back; three phases as for
attention halves. The rows are those of one of eight ranks: an eighth of the experts is here and
gets the tokens of all, so that products have eight ranks' shapes. Nothing is sent: an expert of
another rank is taken for the one here with the same number. What dispatch costs is `bench moe`'s.

Variants: plain PyTorch; FP8 experts of each backend that runs here, with everything around them in
kernels, the shared expert in bf16 or in FP8. Each profile names the kernels that take a share.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ppruntime.launch.bench_halves import PHASES, Bench, Case, Work, run_bench
from ppruntime.models.attention_kernels import AttentionKernels
from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.dims import (
    ModelDims,
    UnitKind,
    changed,
    forward_flops_per_token,
    preset,
    unit_specs,
)
from ppruntime.models.dispatch import AnyExperts
from ppruntime.models.experts import Experts
from ppruntime.models.kernels.attention_backends import Choice
from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.moe import HERE, MoEOptions
from ppruntime.models.moe_kernels import moe_kernels
from ppruntime.models.residual import residual
from ppruntime.models.router import Routing, expert_counts
from ppruntime.models.units import build_unit
from ppruntime.models.weight_copies import WeightVersion, set_weight_version

NUM_RANKS = 8
"""Ranks that share the experts."""
PART = "MoE half"


class OneRankOfMany:
    """A `Dispatcher` that sends nothing: experts of other ranks are those with the same number
    here, so that this rank has the rows that it would get from all of them."""

    def __init__(self, num_held: int) -> None:
        self._num_held = num_held

    def held(self, num_experts: int) -> range:
        assert num_experts % self._num_held == 0, (num_experts, self._num_held)
        return range(self._num_held)

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        folded = routing._replace(experts_NK=routing.experts_NK % self._num_held)
        if isinstance(experts, Experts):
            counts_E = expert_counts(folded.experts_NK, 1, self._num_held)[0]
        return HERE.dispatcher.routed(experts, x_ND, folded, counts_E)


class MoEBench(Bench):
    """Runs the halves' bench over MoE halves; its variants are units of their own."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.dims: ModelDims = changed(preset(options.model), force_balanced_routing=True)

    def run(self) -> None:
        self._measure_floor()
        for name, case in self._variants():
            if isinstance(case, str):
                self.left_out.append(f"{PART} {name}: {case}")
            else:
                self._run_case(case, name, Choice())
            self._write()

    def _prepare(self, case: Case, kernels: AttentionKernels) -> WeightGradQueue:
        """The units are made with their kernels; their weight gradients wait in the queue."""
        queue = WeightGradQueue()
        set_queue(case.module, queue)
        queue.deferring = True
        return queue

    def _variants(self) -> Iterator[tuple[str, Case | str]]:
        yield "reference", self._case(None, in_kernels=False)
        for backend in (ExpertBackend.TRITON, ExpertBackend.DEEP_GEMM):
            reason = unavailable_reason(backend)
            for in_fp8 in (False, True):
                name = f"{backend.value}, shared expert in {'FP8' if in_fp8 else 'bf16'}"
                if reason is not None:
                    yield name, reason
                    continue
                try:
                    case = self._case(backend, in_kernels=True)
                    if in_fp8:
                        self._to_fp8(case.module)
                except ValueError as error:  # sizes that FP8 does not take
                    yield name, str(error)
                    continue
                yield name, case

    def _case(self, backend: ExpertBackend | None, *, in_kernels: bool) -> Case:
        dims, tokens = self.dims, self.options.tokens
        spec = next(s for s in unit_specs(dims) if s.kind is UnitKind.MOE and s.layer)
        fp8 = None
        if backend is not None:
            from ppruntime.models.fp8_experts import Fp8Options  # needs Triton

            fp8 = Fp8Options(backend=backend)
        name = "auto" if in_kernels else "reference"
        options = MoEOptions(
            fp8,
            OneRankOfMany(dims.num_experts // NUM_RANKS),
            moe_kernels(name, name, self.device, self.dtype),
        )
        unit: Any = build_unit(dims, spec, moe=options, device=self.device, dtype=self.dtype)
        with torch.no_grad():  # on the device: to draw them on the host takes longer than all runs
            for parameter in unit.parameters():
                _ = parameter.fill_(1.0) if parameter.dim() < 2 else parameter.normal_(std=0.02)
        set_weight_version(unit, WeightVersion())
        positions = torch.arange(tokens, device=self.device).unsqueeze(0)
        batch = MicroBatch(positions % dims.vocab_size, positions, positions)
        carry = Carry(
            streams=self._normal(1, tokens, dims.num_streams, dims.hidden_size).requires_grad_(),
            mix=torch.rand(1, tokens, dims.num_streams, device=self.device).requires_grad_(),
        )
        unit.residual = residual(name, self.device, dims.residual_type)

        def forward(_: AttentionKernels) -> Sequence[Tensor]:
            made = unit(carry, batch)
            found = (made.streams, made.mix, made.balance_loss)
            return [t for t in found if t is not None and t.grad_fn is not None]

        leaves = [t for t in (carry.streams, carry.mix) if t is not None]
        return Case(PART, "routed", unit, forward, leaves, self._work(spec), ())

    def _work(self, spec: Any) -> dict[str, Work]:
        """Products and the residual streams' bytes, counted as for attention halves."""
        tokens = self.options.tokens
        once = forward_flops_per_token(self.dims, spec, tokens).matmul * tokens
        item = torch.empty((), dtype=self.dtype).element_size()
        streams = float(item * tokens * self.dims.num_streams * self.dims.hidden_size)
        num_bytes = (2.5 * streams, 3.75 * streams, 0.0)
        return dict(zip(PHASES, map(partial(Work, once), num_bytes), strict=True))


def run(options: argparse.Namespace) -> int:
    """Runs with `out, model, tokens, repetitions, device` as bench_layers parses them."""
    return run_bench(options, MoEBench)
