"""FP8 linears inside a stage: FSDP in bf16, split backwards, checkpointing, chosen by config."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ppruntime.config import ConfigError, load
from ppruntime.linear_options import IN_COMPUTE_DTYPE, LinearChoice, choose_linears, use_linears
from ppruntime.memory import state_bytes
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import unit_parameters, unit_specs
from ppruntime.models.fp8_linear_rules import fp8_linears
from ppruntime.models.init import init_parameters
from ppruntime.models.kernels.fp8_linear_backends import LinearBackend
from ppruntime.models.linear import WeightGradQueue, set_queue
from ppruntime.models.save_points import SavePoint
from ppruntime.models.units import build_unit
from ppruntime.plan import cut
from ppruntime.plan_report import plan_text
from ppruntime.stage import Stage
from ppruntime.wrap import Sharding, hold_gradients, reduce_grads, release_gathered, wrap_units

TINY = Path(__file__).parents[2] / "launch" / "configs" / "tiny.toml"
WIDE = (
    "model.hidden_size=128",
    "model.expert_width=128",
    "model.q_lora_rank=128",
    "model.o_lora_rank=64",
    "model.num_experts=4",
)
"""The tiny model with widths that are multiples of 128."""
IN_FP8 = LinearChoice(LinearBackend.REFERENCE)
SEED = torch.tensor(1 / 37)
PRODUCTS = frozenset({SavePoint.PROJECTIONS, SavePoint.EXPERTS})


def _stage(config, choice: LinearChoice, kept, mesh) -> Stage:
    """Embedding, one layer and head as one stage, made as `build.build_stage` does."""
    dims = config.model.dims
    everything = unit_specs(dims)
    specs = [*everything[:3], everything[-1]]
    units = []
    for spec in specs:
        unit = build_unit(dims, spec, dtype=torch.float32)
        init_parameters(unit, spec.name, 3)
        use_linears(unit, choice, config)
        units.append(unit)
    halves = [spec.layer is not None for spec in specs]
    wrap_units(
        units,
        recompute=[kept if is_half else None for is_half in halves],
        sharding=Sharding(mesh, torch.bfloat16),
        fp32_names=[
            frozenset(p.name for p in unit_parameters(dims, spec) if p.fp32) for spec in specs
        ],
    )
    queue = WeightGradQueue()
    for unit in units:
        set_queue(unit, queue)
    return Stage(0, units, inputs=(), outputs=(), queue=queue)


def _step(stage: Stage, mesh, num_micro_batches: int, *, split: bool) -> dict[str, torch.Tensor]:
    """Loss and every parameter's gradient."""
    units = list(stage.units)
    hold_gradients(units)
    stage.reset(loss_seed=SEED, balance_seed=SEED)
    generator = torch.Generator().manual_seed(5)
    for m in range(num_micro_batches):
        ids = torch.randint(0, 256, (1, 24), generator=generator)
        stage.forward(m, (), MicroBatch(ids, ids.roll(-1, 1), torch.arange(24).unsqueeze(0)))
    for m in range(num_micro_batches):
        (stage.backward_input if split else stage.backward)(m, ())
    for m in range(num_micro_batches if split else 0):
        stage.weight_grads(m)
    reduce_grads(units, mesh.get_group())
    release_gathered(units)
    found = {"loss": torch.stack(stage.losses)}
    for name, p in stage.units.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            assert grad.dtype is torch.float32, name
            found[name] = grad.clone()
    stage.units.zero_grad()
    return found


def _gradients_of_every_way(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    config = load([TINY], WIDE)
    tiled = load([TINY], [*WIDE, "kernels.linear=auto", "kernels.linear_wgrad_tile_scales=true"])
    fp8 = _stage(config, IN_FP8, None, mesh)
    found = {
        "whole": _step(fp8, mesh, 2, split=False),
        "split": _step(fp8, mesh, 2, split=True),
        "one, whole": _step(fp8, mesh, 1, split=False),
        "one, split": _step(fp8, mesh, 1, split=True),
        "products kept": _step(_stage(config, IN_FP8, PRODUCTS, mesh), mesh, 1, split=True),
        "tiles": _step(_stage(tiled, IN_FP8, PRODUCTS, mesh), mesh, 1, split=True),
        "bf16": _step(_stage(config, IN_COMPUTE_DTYPE, None, mesh), mesh, 1, split=False),
    }
    dist.destroy_process_group()
    return found


def test_split_and_recomputed_backwards_have_the_same_bits_and_fp8_is_near_bf16(run_ranks):
    (found,) = run_ranks(1, _gradients_of_every_way)
    one = found["one, whole"]
    for way in ("one, split", "products kept"):
        assert one.keys() == found[way].keys()
        for name, grad in one.items():
            assert torch.equal(grad, found[way][name]), (way, name)
    converted = ("attention.q_a", "attention.q_b", "attention.o_b", "moe.shared")
    for name, grad in found["whole"].items():
        assert torch.equal(grad, found["split"][name]), name
    distances = {
        name: float((grad - found["bf16"][name]).norm() / found["bf16"][name].norm())
        for name, grad in one.items()
        if any(part in name for part in converted)
    }
    other = {name for name, grad in one.items() if not torch.equal(grad, found["tiles"][name])}
    taken = ("q_a.weight", "q_b.weight", "o_b.weight", "shared.gate_up.weight")
    assert other == {name for name in one if name.endswith(taken)}
    assert distances
    assert all(0.01 < d < 0.35 for d in distances.values()), distances
    assert abs(float(one["loss"] / found["bf16"]["loss"]) - 1) < 0.01


def test_the_plan_names_what_runs_in_fp8():
    text = plan_text(load([TINY], [*WIDE, "kernels.linear=triton"]))
    assert (
        "linears in FP8 by triton: attention.q_a, attention.q_b, attention.o_b, "
        "moe.shared.gate_up, moe.shared.down" in text
    )
    assert "FP8" not in plan_text(load([TINY], WIDE))


def test_the_plan_counts_two_fp8_copies_of_every_converted_weight():
    plain, fp8 = load([TINY], WIDE), load([TINY], [*WIDE, "kernels.linear=triton"])
    (stage,) = cut(plain.model.dims, (0,), None, seq_len=24)
    elements = sum(
        prod(p.shape)
        for spec in stage.units
        for p in unit_parameters(plain.model.dims, spec)
        if p.name.removesuffix(".weight") in fp8_linears(spec)
    )
    assert elements
    more = state_bytes(fp8, stage).weights - state_bytes(plain, stage).weights
    assert more == 2 * elements


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU can choose")
def test_the_config_chooses_a_backend_or_says_what_works():
    assert choose_linears(load([TINY], WIDE)) is IN_COMPUTE_DTYPE
    named = choose_linears(load([TINY], [*WIDE, "kernels.linear=triton"]))
    assert named == LinearChoice(LinearBackend.TRITON)  # by the interpreter
    auto = choose_linears(load([TINY], [*WIDE, "kernels.linear=auto"]))
    assert auto.backend is LinearBackend.TRITON
    assert auto.note.startswith('kernels.linear = "auto" takes triton, in FP8 (')
    assert "needs a Hopper GPU" in auto.note
    unfit = choose_linears(load([TINY], ["kernels.linear=auto"]))
    assert unfit.backend is None
    assert "hidden_size is 64" in unfit.note
    for name in ("deep_gemm", "scaled_mm"):
        config = load([TINY], [*WIDE, f"kernels.linear={name}"])
        with pytest.raises(ConfigError, match=rf'"{name}" needs a Hopper GPU .*"triton"'):
            choose_linears(config)
