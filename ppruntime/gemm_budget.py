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

from ppruntime.config import ConfigError


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
