"""Config -> how a stage's dense linears are computed, and by whom if the config leaves it open."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ppruntime.config import Config, ConfigError
from ppruntime.models.fp8_linear_rules import misfit
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend, unavailable_reason

_FASTEST_FIRST = (
    LinearBackend.FASTEST,
    LinearBackend.DEEP_GEMM,
    LinearBackend.SCALED_MM,
    LinearBackend.TRITON,
)


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """Who computes the dense linears: `backend` in FP8; None: torch, in the compute dtype."""

    backend: LinearBackend | None
    note: str | None = None
    """What was chosen and why, where the config says "auto"."""


IN_COMPUTE_DTYPE = LinearChoice(None)
"""All linears by torch."""


def choose_linears(config: Config) -> LinearChoice:
    """The backend that the config names, or with "auto" the fastest that works here.

    Raises ConfigError for a named one that does not: what is missing, and what works without it.
    """
    wanted = config.kernels.linear
    if wanted == "reference":
        return IN_COMPUTE_DTYPE
    if wanted != "auto":
        backend = LinearBackend(wanted)
        if (reason := unavailable_reason(backend)) is not None:
            works = "triton" if unavailable_reason(LinearBackend.TRITON) is None else "reference"
            remedy = "" if f'"{works}"' in reason else f'; kernels.linear = "{works}" works here'
            raise ConfigError(f"{reason}{remedy}")
        return LinearChoice(backend)
    if (reason := misfit(config.model.dims)) is not None:
        return LinearChoice(None, _note("reference, in the compute dtype", [reason]))
    reasons: list[str] = []
    for backend in _FASTEST_FIRST:
        reason = unavailable_reason(backend)
        if reason is None:
            return LinearChoice(backend, _note(f"{backend.value}, in FP8", reasons))
        if reason not in reasons:
            reasons.append(reason)
    return LinearChoice(None, _note("reference, in the compute dtype", reasons))


def use_linears(
    unit: nn.Module, choice: LinearChoice, config: Config, gemm_sms: GemmSms | None = None
) -> tuple[str, ...]:
    """Converts the unit's linears as chosen, before it is wrapped; gives their names. `gemm_sms`:
    what may change in a step; None: the config's, for good."""
    if choice.backend is None:
        return ()
    from ppruntime.models.fp8_linear import Fp8LinearOptions, convert_linears  # needs Triton

    sms = gemm_sms or GemmSms(config.pp.gemm_sms)
    tiles = config.kernels.linear_wgrad_tile_scales
    options = Fp8LinearOptions(backend=choice.backend, wgrad_tile_scales=tiles, gemm_sms=sms)
    return convert_linears(unit, options)


def _note(chosen: str, reasons: list[str]) -> str:
    why = f" ({'; '.join(reasons)})" if reasons else ""
    return f'kernels.linear = "auto" takes {chosen}{why}'
