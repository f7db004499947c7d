"""What the config says of dispatch: who does it, and what is said where it cannot."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from small_runs import CONFIG, SMALL, train, trainer_of

from ppruntime.config import ConfigError, load
from ppruntime.experts.deep_ep import unavailable_reason
from ppruntime.experts.dispatch import open_dispatcher, wire_options
from ppruntime.experts.options import ExpertChoice, moe_options
from ppruntime.models.kernels.expert_backends import ExpertBackend
from ppruntime.models.moe import HERE
from ppruntime.transports.agree import DisagreementError

DEEP_EP = ("parallel.ep=2", "moe.dispatch.type=deep_ep", "train.precision=bf16")


ON_THE_CPU = (
    'moe.dispatch.type = "deep_ep" moves tokens between GPUs, this run is on the cpu; use '
    'moe.dispatch.type = "torch" to run without it'
)


def test_deep_ep_on_the_cpu_is_refused_with_the_dispatcher_that_works_before_anything_is_opened():
    config = load([CONFIG], [*SMALL, *DEEP_EP, "pp.size=1", "run.device=auto"])
    nothing_else = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(ConfigError) as caught:
        open_dispatcher(config, nothing_else, timeout_seconds=1)
    assert str(caught.value) == ON_THE_CPU


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_deep_ep_on_the_cpu_ends_the_run_with_the_dispatcher_that_works(tmp_path, run_ranks):
    overrides = (*DEEP_EP, "pp.size=1", "run.device=auto")
    ended = run_ranks(2, train, str(tmp_path / "run"), overrides)
    assert [code for code, _, _ in ended] == [2, 2]
    assert ON_THE_CPU in "".join(told for _, _, told in ended)


@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="says that the package is missing")
def test_a_machine_without_the_package_is_told_its_name_and_how_to_get_it():
    assert unavailable_reason(torch.device("cuda")) == (
        'moe.dispatch.type = "deep_ep" needs the package deep_ep, which is not installed; install '
        "ppruntime[deep-ep] (built for torch 2.11, CUDA 13) or use moe.dispatch.type = "
        '"torch" to run without it'
    )


def test_the_wire_follows_the_config_and_so_do_the_scales_of_fp8_experts():
    keys = ("fp8", "fp8_grad", "weight_grads_after_combine")
    wide = ("model.hidden_size=128", "model.expert_width=128", "moe.compute.backend=triton")
    for key in keys:
        config = load([CONFIG], [*SMALL, "parallel.ep=2", *wide, f"moe.dispatch.{key}=true"])
        wire = wire_options(config)
        assert [getattr(wire, other) for other in keys] == [other == key for other in keys]
        options = moe_options(config, 0, ExpertChoice(ExpertBackend.TRITON), HERE.dispatcher)
        assert options.fp8.power_of_two_scales
        assert options.fp8.power_of_two_grad_scales == (key == "fp8_grad")


def build_over_hosts(rank: int):
    """What a rank is told whose run has two expert groups, the second of them over two hosts."""
    import ppruntime.experts.hosts as hosts

    # The dispatcher is not opened: no GPU is needed to find out that it could not be.
    hosts.socket = SimpleNamespace(gethostname=lambda: f"host-{rank == 3}")
    try:
        with trainer_of((*DEEP_EP, "pp.size=2", "run.device=auto")):
            return "built"
    except DisagreementError as error:
        return str(error)


def test_an_expert_group_over_two_hosts_ends_all_ranks_with_what_works_there(run_ranks):
    told = run_ranks(4, build_over_hosts)
    assert set(told) == {
        "the ranks disagree before the stages are built: the host of the experts of ranks 2, 3 is"
        ' host-False on rank 2 but host-True on rank 3; moe.dispatch.type = "deep_ep" works inside'
        ' a host: give each parallel.ep = 2 neighbouring ranks one host, or use "torch", which'
        " works over hosts"
    }
