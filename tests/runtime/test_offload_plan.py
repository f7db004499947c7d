"""What leaves the device is what the plan says, whatever is recomputed."""

from __future__ import annotations

import pytest
import torch
from small_runs import CONFIG
from whole_model import build_units, random_batch, run

from ppruntime.activation_offload import ActivationOffload, Memory, ToHost
from ppruntime.config import Config, load
from ppruntime.host_memory import HostPool
from ppruntime.models.units import Unit
from ppruntime.offload_plan import leaving_bytes
from ppruntime.plan import cut
from ppruntime.recompute import kept_points
from ppruntime.wrap import wrap_units

CPU = torch.device("cpu")
WHOLE = (
    "pp.size=1",
    "pp.layers_per_stage=default",
    "pp.activation_offload=true",
    "train.seq_len=31",
    "train.micro_batch_size=1",
    "model.sinkhorn_iters=2",
)
MODES = ("none", "full_moe", "matmul")
"""Nothing is computed again; all is; what can be kept is."""


class Counting(ToHost):
    """Notes the sizes of what it moves."""

    sizes: tuple[int, ...] = ()

    def start(self, memories: list[Memory]):  # type: ignore[no-untyped-def,override]
        self.sizes = tuple(memory.num_bytes for memory in memories)
        return super().start(memories)


def wrapped(config: Config) -> list[Unit]:
    units = build_units(config.model.dims, 2)
    points = [kept_points(config, unit.spec) for unit in units]
    wrap_units(units, recompute=points, sharding=None, fp32_names=[()] * len(units))
    return units


@pytest.mark.parametrize(
    "mode", [*((mode,) for mode in MODES), ("selective", 'ac.save=["engram", "attention"]')]
)
def test_all_that_a_mode_keeps_leaves_and_comes_back(mode):
    name, *saved = mode
    config = load([CONFIG], [f"ac.mode={name}", *saved, *WHOLE])
    (stage,) = cut(config.model.dims, (0,), None, seq_len=31)
    batch = random_batch(config.model.dims, 2, [(13, 18)])
    units, plain = wrapped(config), wrapped(config)
    loss = run(plain, batch).loss
    loss.backward()

    mover = Counting(CPU, HostPool(CPU, page_bytes=1 << 16))
    standing = [t for unit in units for t in (*unit.parameters(), *unit.buffers())]
    offload = ActivationOffload(mover, {0: lambda: standing})
    with offload.collecting((0, 0), [t for t in batch if t is not None]):
        moved = run(units, batch).loss
    offload.offload((0, 0))
    # To the byte, but for pieces too small to move and expert loads, which no plan counts.
    assert sum(mover.sizes) == pytest.approx(leaving_bytes(config, stage), abs=1000)
    offload.offloaded((0, 0))
    offload.reload((0, 0))
    offload.arrive((0, 0))
    moved.backward()
    assert torch.equal(loss, moved)
    for unit, other in zip(units, plain, strict=True):
        for ours, theirs in zip(unit.parameters(), other.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
