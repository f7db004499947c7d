"""AdamW over one rank's parameters, in fp32, with moments that a checkpoint can name.

The update of one parameter reads that parameter alone, and on the CPU each is updated by a loop of
its own: the result is bitwise the same however the model is cut over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_VOCABULARY = frozenset({"embed.weight", "head.projection.weight"})
"""One row a token: a decay would wear down the rows of rare tokens."""


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether weight decay applies: to matrices that every token multiplies with, and to experts.

    Not to norms, biases, sinks, mHC offsets and scales and Engram's gate weights, nor to embedding,
    head and Engram tables. In the models' names a matrix is a `weight` of two or three dimensions.
    """
    return len(shape) >= 2 and name.endswith(".weight") and name not in _VOCABULARY


def trainable_in_fp32(params: Mapping[str, nn.Parameter], whose: str) -> dict[str, nn.Parameter]:
    """Those that need a gradient. Raises ValueError, in the name of the optimizer `whose` they are,
    for one that is not fp32."""
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    for name, param in trainable.items():
        if param.dtype is not torch.float32:
            raise ValueError(
                f"{whose} got {name} in {param.dtype}; keep parameters in torch.float32 and cast"
                " them to the compute dtype in the forward"
            )
    return trainable


def make_adamw(
    params: Mapping[str, nn.Parameter],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    decays: Callable[[str, Sequence[int]], bool] = decays,
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) over the parameters that need a gradient.
    `decays(name, shape)` says which decay.

    There are groups with and without decay, of whole tensors and of those sharded over each mesh;
    any may be empty, so a rank without parameters is no special case. A fused update takes no
    mixture of meshes, nor of sharded tensors and others. All state is made at once: memory is known
    before the first step, and a checkpoint finds the same names at every step. On CUDA the update
    is fused.
    Raises ValueError for a parameter that is not fp32: a bf16 weight forgets updates below 2^-8.
    """
    trainable = trainable_in_fp32(params, "AdamW")
    meshes = list(dict.fromkeys((None, *map(_mesh, trainable.values()))))
    groups = [
        {
            "params": [
                p
                for name, p in trainable.items()
                if decays(name, p.shape) == decayed and _mesh(p) == mesh
            ],
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
        for mesh in meshes
    ]
    fused = any(param.is_cuda for param in trainable.values())
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=False, fused=fused)
    for param in trainable.values():
        optimizer.state[param] = {
            # As AdamW itself would make it: on the host, unless the fused kernel counts the steps.
            "step": torch.zeros((), device=param.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
        }
    return optimizer


def _mesh(param: nn.Parameter) -> DeviceMesh | None:
    return param.device_mesh if isinstance(param, DTensor) else None


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of the next step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_tensors(
    optimizer: torch.optim.Optimizer, params: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's own tensors by checkpoint name: "optim.exp_avg.layers.3.attn.q_a.weight".

    They are the tensors that the next step reads and writes: loading into them restores the state.
    The step count is kept per parameter, because a parameter without a gradient does not count it.
    """
    tensors: dict[str, Tensor] = {}
    for name, param in params.items():
        for key, value in optimizer.state.get(param, {}).items():
            tensors[f"optim.{key}.{name}"] = value
    return tensors
