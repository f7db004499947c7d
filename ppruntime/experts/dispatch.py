"""Config -> what brings tokens to the experts of this rank's stages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from ppruntime.config import Config, ConfigError
from ppruntime.experts import deep_ep
from ppruntime.experts.exchange import ProcessExchange
from ppruntime.models.all_to_all import AllToAll
from ppruntime.models.dispatch import AllHere, Dispatcher, WireOptions
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.token_dispatch import TokenDispatcher
from ppruntime.ranks import Ranks, open_expert_group


def open_dispatchers(
    config: Config,
    ranks: Ranks,
    stages: Sequence[int],
    *,
    timeout_seconds: float,
    gemm_sms: GemmSms | None = None,
) -> dict[int, Dispatcher]:
    """The dispatcher of each of this rank's stages: one serves them all, unless pairs overlap. What
    two stages send at once needs buffers and communicators of its own. A collective of the expert
    group; raises as `open_dispatcher`."""
    if not config.pp.overlap_pairs:
        shared = open_dispatcher(config, ranks, timeout_seconds=timeout_seconds, gemm_sms=gemm_sms)
        return dict.fromkeys(stages, shared)
    return {
        stage: open_dispatcher(
            config, ranks, timeout_seconds=timeout_seconds, gemm_sms=gemm_sms, stage=stage
        )
        for stage in stages
    }


def open_dispatcher(
    config: Config,
    ranks: Ranks,
    *,
    timeout_seconds: float,
    gemm_sms: GemmSms | None = None,
    stage: int | None = None,
) -> Dispatcher:
    """The dispatcher that the config names, over the ranks that this rank shares its experts with;
    an exchange may take so long. `stage`: the one that it serves, None: any. `gemm_sms`: the
    budget that a fused layer looks at, None: the config's. A collective of these ranks.

    Raises ConfigError, before any of it, for one that does not work here: what is missing, and
    what works without it.
    """
    if (reason := unavailable_reason(config, ranks.device)) is not None:
        raise ConfigError(reason)
    if config.moe.dispatch.type == "mega_moe":
        from ppruntime.experts.arena import open_mega_moe  # needs Triton

        return open_mega_moe(config, ranks, timeout_seconds=timeout_seconds, gemm_sms=gemm_sms)
    if ranks.layout.ep == 1:
        return AllHere()
    group = open_expert_group(ranks, timeout_seconds=timeout_seconds, stage=stage)
    options, wire = config.moe.dispatch, wire_options(config)
    if options.type == "deep_ep":
        buffer = deep_ep.DeepEpBuffer(
            group,
            ranks.expert_group_ranks,
            hidden=config.model.dims.hidden_size,
            num_sms=options.transfer_sms,
        )
        return TokenDispatcher(buffer, wire, num_chunks=options.token_chunks)
    return AllToAll(ProcessExchange.of(group, stage=stage), wire)


def wire_options(config: Config) -> WireOptions:
    """How rows travel, for every dispatcher."""
    options = config.moe.dispatch
    return WireOptions(
        fp8=options.fp8,
        fp8_grad=options.fp8_grad,
        weight_grads_after_combine=options.weight_grads_after_combine,
    )


def unavailable_reason(config: Config, device: torch.device) -> str | None:
    """Why the dispatcher that the config names cannot run here; None if it can."""
    options = config.moe.dispatch
    for name in ("fp8", "fp8_grad"):
        if getattr(options, name) and find_spec("triton") is None:
            return (
                f"moe.dispatch.{name} = true rounds rows as the FP8 experts do and needs the "
                "package triton, which is not installed; leave it out"
            )
    if options.type == "mega_moe":
        return _mega_moe_reason(device)
    return deep_ep.unavailable_reason(device) if options.type == "deep_ep" else None


def _mega_moe_reason(device: torch.device) -> str | None:
    asked = 'moe.dispatch.type = "mega_moe"'
    remedy = 'use "torch", which runs everywhere'
    if device.type != "cuda":
        return (
            f"{asked}: ranks read and write each other's GPU memory, and this rank runs on "
            f"{device.type}; {remedy}"
        )
    if find_spec("triton") is None:
        return f"{asked} needs the package triton, which is not installed; {remedy}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"{asked} needs a Hopper GPU (sm_90) or newer; {remedy}"
    return None
