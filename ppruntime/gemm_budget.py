"""`pp.gemm_sms`: the multiprocessors that GEMMs may occupy, so that transfers find some free.

A persistent kernel started on every multiprocessor runs in two waves beside a transfer that holds
a few. Our Triton kernels and deep_gemm are given the number at each launch (`Fp8Options.gemm_sms`);
here it is told to torch, for the kernels that torch calls: FP8 products (cuBLASLt and CUTLASS obey)
and bf16 ones with a bias (cuBLASLt takes it for its choice of kernel, a hint only). torch 2.11 does
not hand it to plain bf16 matmuls (cublasGemmEx), whose kernels on Hopper are not persistent
(pytorch/pytorch#144974, #183330).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from msgspec.structs import replace

from ppruntime.config import Config, ConfigError

DEFAULT_CTAS = 4
"""Thread blocks of an nccl transfer where the config names no number. NCCL itself takes up to 32,
and holds their multiprocessors while it waits for the peer: with 4 a two-rank step took 0.93 of the
time, and with `_HELD` times as many left free by GEMMs 0.95 of that (two H200s, two runs:
pipeline-nccl-*.json)."""
_HELD = 3
"""Transfers of a rank that GEMMs leave room for: two receives often wait, beside a send."""


def transport_ctas(config: Config) -> int | None:
    """What nccl's channels are opened with; None, which leaves it to NCCL, where the config names
    another transport or none."""
    given = config.pp.transport_ctas
    return DEFAULT_CTAS if given is None and config.pp.transport == "nccl" else given


def with_gemm_budget(config: Config, device: torch.device) -> Config:
    """The config with `pp.gemm_sms` as this process uses it, after torch has been told: as given;
    where it is left out and nccl moves the boundaries, what its transfers leave of the GPU.

    Raises ConfigError as `limit_gemms` does.
    """
    gemm_sms, ctas = config.pp.gemm_sms, transport_ctas(config)
    waits_on_sms = config.pp.transport == "nccl" and config.pp.size > 1 and device.type == "cuda"
    if gemm_sms is None and waits_on_sms and ctas is not None:
        num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
        gemm_sms = max(num_sms - _HELD * ctas, num_sms // 2)
    limit_gemms(gemm_sms, device)
    return replace(config, pp=replace(config.pp, gemm_sms=gemm_sms))


def limit_gemms(gemm_sms: int | None, device: torch.device) -> None:
    """Tells torch the budget of this process, None: all multiprocessors, as at first.

    Raises ConfigError where it has no effect or is more than the GPU has.
    """
    library: Any = torch._C
    if gemm_sms is None:
        if device.type == "cuda" and library._get_sm_carveout_experimental() is not None:
            library._set_sm_carveout_experimental(None)
        return
    if device.type != "cuda":
        raise ConfigError(
            f"pp.gemm_sms = {gemm_sms} has no effect on the {device.type}; leave it out"
        )
    num_sms: int = torch.cuda.get_device_properties(device).multi_processor_count
    if gemm_sms > num_sms:
        raise ConfigError(
            f"pp.gemm_sms = {gemm_sms}, but {device} has {num_sms} multiprocessors; use at most"
            f" {num_sms}, or leave it out for all"
        )
    with warnings.catch_warnings():  # torch says once that the setting is experimental
        warnings.simplefilter("ignore")
        library._set_sm_carveout_experimental(num_sms - gemm_sms)
