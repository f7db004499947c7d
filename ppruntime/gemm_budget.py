"""`pp.gemm_sms`: the multiprocessors that GEMMs may occupy, so that transfers find some free; and
`pp.pair_gemm_sms`, what each half of a pair may occupy while both run.

A persistent kernel started on every multiprocessor runs in two waves beside a transfer that holds
a few. Our Triton kernels and deep_gemm are given the number at each launch (`models.GemmSms`);
here it is told to torch, for the kernels that torch calls: FP8 products (cuBLASLt and CUTLASS obey)
and bf16 ones with a bias (cuBLASLt takes it for its choice of kernel, a hint only). torch 2.11 does
not hand it to plain bf16 matmuls (cublasGemmEx), whose kernels on Hopper are not persistent
(pytorch/pytorch#144974, #183330). Both settings are the process's and are read at a launch, so
whoever enqueues a half's work sets them before it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from msgspec.structs import replace

from ppruntime.config import Config, ConfigError
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.schedules.lanes import Half

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
    return DEFAULT_CTAS if given is None and "nccl" in config.pp.transport_names else given


def with_gemm_budget(config: Config, device: torch.device) -> Config:
    """The config with `pp.gemm_sms` as this process uses it, after torch has been told: as given;
    where it is left out and nccl moves the boundaries, what its transfers leave of the GPU.

    Raises ConfigError as `limit_gemms` does, for the halves of pairs too.
    """
    gemm_sms, ctas = config.pp.gemm_sms, transport_ctas(config)
    is_named = "nccl" in config.pp.transport_names
    waits_on_sms = is_named and config.pp.size > 1 and device.type == "cuda"
    if gemm_sms is None and waits_on_sms and ctas is not None:
        gemm_sms = max(_num_sms(device) - _HELD * ctas, _num_sms(device) // 2)
    _check_pair_budget(config, gemm_sms, device)
    limit_gemms(gemm_sms, device)
    return replace(config, pp=replace(config.pp, gemm_sms=gemm_sms))


class GemmBudget:
    """The budget of this process, as it changes through a step. `sms` is what layers are built
    with. `config` is one from `with_gemm_budget`."""

    def __init__(self, config: Config, device: torch.device, *, sms: GemmSms | None = None) -> None:
        """`sms`: of layers that are there already; None: a new one."""
        pp = config.pp
        self._device = device
        forward, backward = pp.pair_gemm_sms or (pp.gemm_sms, pp.gemm_sms)
        self._of: dict[Half | None, int | None] = {
            None: pp.gemm_sms,
            "forward": forward,
            "backward": backward,
        }
        self.sms = sms or GemmSms()
        self.sms.now = pp.gemm_sms

    @property
    def halves(self) -> tuple[Half | None, ...]:
        """The arguments of `use` that differ."""
        seen: dict[int | None, Half | None] = {}
        for half, sms in self._of.items():
            seen.setdefault(sms, half)
        return tuple(seen.values())

    def use(self, half: Half | None) -> None:
        """What is launched from now on is this half of a pair; None: none of one."""
        wanted = self._of[half]
        if wanted != self.sms.now:
            limit_gemms(wanted, self._device)
            self.sms.now = wanted


def limit_gemms(gemm_sms: int | None, device: torch.device) -> None:
    """Tells torch the budget of this process, None: all multiprocessors, as at first.

    Raises ConfigError where it has no effect or is more than the GPU has.
    """
    library: Any = torch._C
    if gemm_sms is None:
        if device.type == "cuda" and library._get_sm_carveout_experimental() is not None:
            library._set_sm_carveout_experimental(None)
        return
    _check_budget("pp.gemm_sms", gemm_sms, device)
    with warnings.catch_warnings():  # torch says once that the setting is experimental
        warnings.simplefilter("ignore")
        library._set_sm_carveout_experimental(_num_sms(device) - gemm_sms)


def _check_pair_budget(config: Config, gemm_sms: int | None, device: torch.device) -> None:
    key, halves = "pp.pair_gemm_sms", config.pp.pair_gemm_sms
    if halves is None:
        return
    for half in halves:
        _check_budget(key, half, device)
    there = gemm_sms or _num_sms(device)
    if config.moe.dispatch.type == "mega_moe" and sum(halves) > there:
        raise ConfigError(
            f"{key} = {list(halves)} gives both halves {sum(halves)} of {there} multiprocessors;"
            ' with moe.dispatch.type = "mega_moe" the programs of both wait for rows that others'
            " bring, who need room too: the two have to share them, such as"
            f" {[there // 2, there // 2]}"
        )


def _check_budget(key: str, sms: int, device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(f"{key} = {sms} has no effect on the {device.type}; leave it out")
    if sms > _num_sms(device):
        raise ConfigError(
            f"{key} = {sms}, but {device} has {_num_sms(device)} multiprocessors; use at most"
            f" {_num_sms(device)}, or leave it out for all"
        )


def _num_sms(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
