"""Which kernels a config's run will have, "auto" as on the GPU that it may be for. Pure; no torch.

What the ledger and the plan count by; the run itself asks what can run where it is
(`kernel_choice`).
"""

from __future__ import annotations

from ppruntime.config.keys import Config
from ppruntime.models.expert_bytes import ExpertForm
from ppruntime.models.fp8_linear_rules import misfit as fp8_misfit
from ppruntime.models.kernel_limits import AttentionOp, Backend, misfit


def expert_form(config: Config) -> ExpertForm:
    """How the routed experts are computed; "auto" in FP8, as on a GPU, unless the config is for
    none."""
    backend, dispatch = config.moe.compute.backend, config.moe.dispatch
    on_gpu = _may_be_on_gpu(config)
    fp8 = on_gpu if backend == "auto" else backend != "torch"
    return ExpertForm(
        fp8=fp8,
        keeps_z=config.moe.compute.keep_expert_activations,
        num_ranks=config.parallel.ep,
        dispatcher=dispatch.type if config.parallel.ep > 1 else "here",
        fp8_wire=dispatch.fp8,
        num_chunks=dispatch.token_chunks,
        by_expert=on_gpu and not fp8,
        fused_swiglu=kernel(config, "swiglu") == "triton",
    )


def has_fp8_linears(config: Config) -> bool:
    """Whether dense linears are in FP8; "auto" as for experts, where the widths fit."""
    if config.kernels.linear != "auto":
        return config.kernels.linear != "reference"
    return _may_be_on_gpu(config) and fp8_misfit(config.model.dims) is None


def attention_kernels(config: Config) -> frozenset[AttentionOp]:
    """Operations of attention that are not the reference's; "auto" as on a Hopper, if the config
    may be for one."""

    def is_other(op: AttentionOp) -> bool:
        name = getattr(config.kernels, op.value)
        if name != "auto" or op is AttentionOp.GROUPED_OUTPUT:
            return bool(name != "reference")
        is_for_cpu = config.train.precision == "fp32" or config.run.device == "cpu"
        return not is_for_cpu and misfit(op, Backend.TRITON, config.model.dims) is None

    return frozenset(op for op in AttentionOp if is_other(op))


def head_kernel(config: Config) -> str:
    """`kernels.head`, with "auto" as a GPU has it unless the config is for none."""
    if config.kernels.head != "auto":
        return config.kernels.head
    return "triton" if _may_be_on_gpu(config) else "chunked"


def kernel(config: Config, key: str) -> str:
    """`kernels.KEY`, for "auto" as for the head."""
    name: str = getattr(config.kernels, key)
    if name != "auto":
        return name
    return "triton" if _may_be_on_gpu(config) else "reference"


def _may_be_on_gpu(config: Config) -> bool:
    return config.train.precision == "bf16" and config.run.device != "cpu"
