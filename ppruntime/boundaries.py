"""What crosses between stages: from the model's sizes, and from a run of the stage that sends it.

Both ends of a hop open their channel with the shapes that the sizes give; the sender first checks
that its stage really makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ppruntime.models.carry import DIFFERENTIABLE, MicroBatch
from ppruntime.models.dims import ModelDims, carry_shape
from ppruntime.plan import StagePlan
from ppruntime.schedules.ops import Kind
from ppruntime.stage import Stage
from ppruntime.transports.base import Boundary, TensorSpec


def expected_boundaries(
    dims: ModelDims,
    plan: Sequence[StagePlan],
    *,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
) -> tuple[Boundary, ...]:
    """What each stage but the last hands to the next for one micro-batch of [batch, seq_len] tokens
    in the compute dtype. Pure."""
    dtype_name = str(dtype).removeprefix("torch.")

    def spec(name: str, stage: StagePlan) -> TensorSpec:
        shape, field_dtype = carry_shape(
            dims, name, batch, seq_len, after=stage.after, dtype=dtype_name
        )
        return TensorSpec(name, shape, getattr(torch, field_dtype))

    return tuple(Boundary(tuple(spec(n, stage) for n in stage.outputs)) for stage in plan[:-1])


def probe(
    stage: Stage, received: Boundary | None, *, batch: int, seq_len: int, device: torch.device
) -> Boundary:
    """What the stage makes of `received`: one forward without gradients on blank input, shapes and
    dtypes taken off the result. None: the first stage, which receives nothing."""
    outputs = stage.evaluate(0, _blank(received, device), _blank_tokens(batch, seq_len, device))
    return Boundary(
        tuple(
            TensorSpec(name, tuple(output.shape), output.dtype)
            for name, output in zip(stage.outputs, outputs, strict=True)
        )
    )


def warm_up(
    stage: Stage,
    received: Boundary | None,
    *,
    backwards: Collection[Kind] = (Kind.B, Kind.I),
    batch: int,
    seq_len: int,
    device: torch.device,
) -> None:
    """A micro-batch forward and back on blank input, once for each kind in `backwards`, so that
    every kernel of a step is loaded. Never more in memory than in a step that goes back like that:
    weight gradients that wait need what they are computed from.

    CUDA may wait for all that runs on the device when it loads a kernel. With a receive running
    that waits for a peer, and the peer in the same state, the first step would never end. Gradients
    are left behind; the caller clears them.
    """
    tokens = _blank_tokens(batch, seq_len, device)
    one = torch.ones((), device=device)
    for kind in (Kind.B, Kind.I):
        if kind not in backwards:
            continue
        stage.reset(loss_seed=one, balance_seed=one)
        outputs = stage.forward(0, _blank(received, device), tokens)
        grads = tuple(
            torch.zeros_like(output)
            for name, output in zip(stage.outputs, outputs, strict=True)
            if name in DIFFERENTIABLE
        )
        del outputs  # as a run has sent them by then
        if kind is Kind.B:
            stage.backward(0, grads)
        else:
            stage.backward_input(0, grads)
            stage.weight_grads(0)
        del grads
    stage.reset(loss_seed=one, balance_seed=one)


def _blank(boundary: Boundary | None, device: torch.device) -> tuple[Tensor, ...]:
    specs = boundary.tensors if boundary else ()
    return tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in specs)


def _blank_tokens(batch: int, seq_len: int, device: torch.device) -> MicroBatch:
    blank = torch.zeros(batch, seq_len, dtype=torch.int64, device=device)
    positions = torch.arange(seq_len, device=device).expand(batch, -1).contiguous()
    return MicroBatch(blank, blank, positions)
