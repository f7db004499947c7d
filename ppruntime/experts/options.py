"""Config -> how the experts of a stage are computed, and by whom if the config leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

from ppruntime.config import Config, ConfigError
from ppruntime.models.dispatch import Dispatcher
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels.expert_backends import ExpertBackend, unavailable_reason
from ppruntime.models.moe import MoEOptions
from ppruntime.models.moe_kernels import REFERENCE, MoEKernels

_FASTEST_FIRST = (ExpertBackend.DEEP_GEMM, ExpertBackend.TRITON)


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """Who computes the experts: `backend` in FP8; None: torch, in the compute dtype."""

    backend: ExpertBackend | None
    note: str | None = None
    """What was chosen and why, where the config says "auto"."""


BY_TORCH = ExpertChoice(None)
"""Experts in the compute dtype."""


def choose_experts(config: Config) -> ExpertChoice:
    """The backend that the config names, or with "auto" the fastest that works here.

    Raises ConfigError for a named one that does not: what is missing, and what works without it.
    """
    wanted = config.moe.compute.backend
    if wanted == "torch":
        return BY_TORCH
    if wanted != "auto":
        backend = ExpertBackend(wanted)
        if (reason := unavailable_reason(backend)) is not None:
            # A reason may name a backend that works; where it does not, torch does everywhere.
            remedy = '; use "torch", which runs everywhere'
            if unavailable_reason(ExpertBackend.TRITON) is None:
                remedy = "" if '"triton"' in reason else '; use "triton"'
            raise ConfigError(f"{reason}{remedy}")
        return ExpertChoice(backend)
    reasons: list[str] = []
    fused = config.moe.dispatch.type == "mega_moe"
    for backend in _FASTEST_FIRST:
        if fused and backend is ExpertBackend.DEEP_GEMM:
            reasons.append('deep_gemm cannot wait for rows of moe.dispatch.type = "mega_moe"')
            continue
        reason = unavailable_reason(backend)
        if reason is None:
            return ExpertChoice(backend, _note(f"{backend.value}: FP8 experts", reasons))
        reasons.append(reason)
    return ExpertChoice(None, _note("torch: experts in the compute dtype", reasons))


def moe_options(
    config: Config,
    stage: int,
    choice: ExpertChoice,
    dispatcher: Dispatcher,
    kernels: MoEKernels = REFERENCE,
    *,
    gemm_sms: GemmSms | None = None,
) -> MoEOptions:
    """How stage `stage` computes its experts, which `dispatcher` reaches, and what lies around
    them. `gemm_sms`: what may change in a step; None: the config's, for good."""
    if choice.backend is None:
        return MoEOptions(dispatcher=dispatcher, kernels=kernels)
    from ppruntime.models.fp8_experts import Fp8Options  # needs Triton

    compute = config.moe.compute
    fp8 = Fp8Options(
        backend=choice.backend,
        keep_expert_activations=compute.keep_expert_activations,
        fp8_transposed_on_demand=compute.turns_on_demand(stage),
        free_weights=compute.frees_weights(stage),
        wgrad_tile_scales=compute.wgrad_tile_scales,
        fused_wgrad_micro_batches=compute.num_fused(stage),
        power_of_two_grad_scales=config.moe.dispatch.fp8_grad,
        gemm_sms=gemm_sms or GemmSms(config.pp.gemm_sms),
    )
    return MoEOptions(fp8, dispatcher, kernels)


def _note(chosen: str, reasons: list[str]) -> str:
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f'moe.compute.backend = "auto" takes {chosen}{why}'
