"""pp.gemm_sms reaches torch and our kernels, and is refused where it would have no effect."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ppruntime.config import ConfigError, load
from ppruntime.connect import transport_options
from ppruntime.experts.options import ExpertChoice, moe_options
from ppruntime.gemm_budget import GemmBudget, limit_gemms, with_gemm_budget
from ppruntime.models.kernels import grouped_gemm
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.moe import HERE

TINY = "launch/configs/tiny.toml"
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def carveouts(monkeypatch):
    """What torch is told, on a GPU of 132 multiprocessors."""
    told = [None]
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", told.append)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: told[-1])
    return told


def test_torch_leaves_free_what_the_budget_does_not_name_and_all_is_its_own_again(carveouts):
    limit_gemms(None, CUDA)
    assert carveouts == [None]  # not told anything: nothing was set
    limit_gemms(116, CUDA)
    limit_gemms(None, CUDA)
    assert carveouts == [None, 16, None]


def test_this_torch_has_the_setting():
    assert torch._C._get_sm_carveout_experimental() is None
    assert callable(torch._C._set_sm_carveout_experimental)


def test_a_budget_without_effect_or_beyond_the_gpu_is_refused(carveouts):
    with pytest.raises(ConfigError, match=r"pp\.gemm_sms = 116 has no effect on the cpu; leave it"):
        limit_gemms(116, CPU)
    with pytest.raises(ConfigError, match=r"gemm_sms = 140, but cuda:0 has 132 .*use at most 132"):
        limit_gemms(140, CUDA)
    limit_gemms(None, CPU)
    assert carveouts == [None]


@pytest.mark.parametrize(
    ("keys", "sms", "ctas"),
    [
        (["pp.transport=nccl"], 120, 4),
        (["pp.transport=nccl", "pp.transport_ctas=8"], 108, 8),
        (["pp.transport=nccl", "pp.transport_ctas=64"], 66, 64),
        (["pp.transport=nccl", "pp.gemm_sms=100"], 100, 4),
        (["pp.transport=copy_engine"], None, None),
        (['pp.transport=["put","nccl"]', "pp.size=3"], 120, 4),
        (["pp.transport=auto"], None, None),
        (["pp.transport=nccl", "pp.size=1"], None, 4),
    ],
    ids=str,
)
def test_gemms_leave_room_for_nccls_waiting_transfers_unless_told_otherwise(
    carveouts, keys, sms, ctas
):
    config = load(["launch/configs/tiny.toml"], ["pp.size=2", *keys])
    assert with_gemm_budget(config, CUDA).pp.gemm_sms == sms
    assert carveouts[-1] == (None if sms is None else 132 - sms)
    assert transport_options(config).get("transport_ctas") == ctas


PAIRS = ["pp.schedule=dualpipe_v", "pp.overlap_pairs=true"]


def test_a_pairs_halves_have_budgets_of_their_own_which_torch_and_our_kernels_are_told(carveouts):
    config = load([TINY], ["pp.size=2", *PAIRS, "pp.gemm_sms=120", "pp.pair_gemm_sms=[80, 40]"])
    budget = GemmBudget(with_gemm_budget(config, CUDA), CUDA)
    assert budget.halves == (None, "forward", "backward")
    told = []
    for half in ("backward", "forward", "forward", None, None):
        budget.use(half)
        told.append((budget.sms.now, carveouts[-1]))
    assert told == [(40, 92), (80, 52), (80, 52), (120, 12), (120, 12)]
    assert len(carveouts) == 1 + 1 + 3  # nothing is told twice


def test_without_a_budget_for_pairs_theirs_is_the_usual_one(carveouts):
    config = load([TINY], ["pp.size=2", *PAIRS, "pp.gemm_sms=120"])
    budget = GemmBudget(with_gemm_budget(config, CUDA), CUDA)
    assert budget.halves == (None,)
    for half in ("backward", "forward", None):
        budget.use(half)
        assert (budget.sms.now, carveouts[-1]) == (120, 12)


@pytest.mark.parametrize(
    ("keys", "device", "text"),
    [
        ("[140, 66]", CUDA, r"pair_gemm_sms = 140, but cuda:0 has 132 .*use at most 132"),
        ("[66, 66]", CPU, r"pp\.pair_gemm_sms = 66 has no effect on the cpu; leave it out"),
    ],
)
def test_a_budget_of_pairs_that_the_device_does_not_have_is_refused(carveouts, keys, device, text):
    config = load([TINY], ["pp.size=2", *PAIRS, f"pp.pair_gemm_sms={keys}"])
    with pytest.raises(ConfigError, match=text):
        with_gemm_budget(config, device)


@pytest.mark.parametrize(
    ("keys", "there"), [((), 132), (("pp.gemm_sms=120",), 120)], ids=["all", "limited"]
)
def test_halves_whose_products_wait_for_rows_have_to_share_the_gpu(carveouts, keys, there):
    fused = ["model.hidden_size=128", "model.expert_width=128", "train.precision=bf16"]
    fused += ["moe.dispatch.type=mega_moe", "pp.size=2", *PAIRS, *keys]
    config = load([TINY], [*fused, "pp.pair_gemm_sms=[100, 80]"])
    text = (
        rf"= \[100, 80\] gives both halves 180 of {there} .* such as \[{there // 2}, {there // 2}"
    )
    with pytest.raises(ConfigError, match=text):
        with_gemm_budget(config, CUDA)
    shared = load([TINY], [*fused, "pp.pair_gemm_sms=[80, 40]"])
    assert with_gemm_budget(shared, CUDA).pp.pair_gemm_sms == (80, 40)


def test_on_a_cpu_nothing_is_left_free():
    config = load(["launch/configs/tiny.toml"], ["pp.size=2", "pp.transport=nccl"])
    assert with_gemm_budget(config, CPU).pp.gemm_sms is None


def test_the_config_refuses_it_on_a_cpu():
    with pytest.raises(ConfigError, match=r'run\.device = "cpu" and pp\.gemm_sms = 116'):
        load(["launch/configs/tiny.toml"], ["pp.gemm_sms=116", "run.device=cpu"])


def test_the_experts_kernels_get_the_budget_and_start_no_more_programs():
    config = load(["launch/configs/tiny.toml"], ["pp.gemm_sms=100"])
    options = moe_options(config, 0, ExpertChoice(ExpertBackend.TRITON), HERE.dispatcher)
    assert options.fp8.gemm_sms.now == 100
    for tile in (grouped_gemm.FORWARD_TILE, replace(grouped_gemm.FORWARD_TILE, num_warps=8)):
        per_sm = 8 // tile.num_warps
        assert grouped_gemm.num_programs(10_000, tile, 100) == 100 * per_sm
        assert grouped_gemm.num_programs(7, tile, 100) == 7
