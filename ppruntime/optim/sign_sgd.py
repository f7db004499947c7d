"""SignSGD: every weight moves by the learning rate against its gradient's sign. No state.

The update of a parameter reads its own gradient and nothing else, not even its scale: it can run as
soon as that gradient is reduced. Source: Bernstein et al. 2018, algorithm 1; decay as in AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppruntime.optim.adamw import decays, trainable_in_fp32


class SignSGD(torch.optim.Optimizer):
    """p <- p (1 - lr decay) - lr sign(grad), in place; on CUDA in one pass, with the same bits.

    A gradient that is zero or not a number leaves its weight where the decay puts it.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        assert closure is None, "SignSGD takes no closure"
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    _update(param, param.grad, group)

    @torch.no_grad()
    def apply(self, params: set[nn.Parameter]) -> None:
        """Updates those of `params` that have a gradient, and frees the gradients."""
        for group in self.param_groups:
            for param in group["params"]:
                if param in params and param.grad is not None:
                    _update(param, param.grad, group)
                    param.grad = None


def make_sign_sgd(
    params: Mapping[str, nn.Parameter], *, lr: float, weight_decay: float = 0.1
) -> SignSGD:
    """SignSGD over the parameters that need a gradient, with decay for those that `decays` names.

    Raises ValueError for a parameter that is not fp32, as `make_adamw` does.
    """
    trainable = trainable_in_fp32(params, "SignSGD")
    groups = [
        {
            "params": [p for name, p in trainable.items() if decays(name, p.shape) == decayed],
            "weight_decay": weight_decay if decayed else 0.0,
        }
        for decayed in (True, False)
    ]
    return SignSGD(groups, lr=lr)


def sign_update_reference(param: Tensor, grad: Tensor, *, lr: float, decay: float) -> None:
    """The update of one whole tensor in torch: what it means, and how the CPU does it."""
    param.mul_(1 - lr * decay)
    param.add_(grad.sign(), alpha=-lr)


def _update(param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
    if isinstance(param, DTensor):
        assert isinstance(grad, DTensor), "a sharded parameter has a whole gradient"
        param, grad = param.to_local(), grad.to_local()
    if param.is_cuda:
        from ppruntime.optim.sign_sgd_kernel import sign_update

        sign_update(param, grad, lr=group["lr"], decay=group["weight_decay"])
    else:
        sign_update_reference(param, grad, lr=group["lr"], decay=group["weight_decay"])
