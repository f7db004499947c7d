"""What a recomputed unit keeps of its forward: the results of some ops, for its recompute.

As torch's selective checkpointing, but the results are saved as autograd saves tensors: through the
hooks that are on around the unit. Who moves saved tensors off the device moves these with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ppruntime.models.save_points import is_kept


class KeptResults:
    """Of one run of one unit: `keeping` around its forward, then `save`, and `replaying` around its
    recompute, which gets the results in the order in which the forward made them, each once.
    `points` are groups of ops and ops by name (`save_points`)."""

    def __init__(self, points: frozenset[str]) -> None:
        self._points = points
        self._found: list[Tensor] = []
        self._saved: Callable[[], Sequence[Tensor]] | None = None
        self._results: dict[Any, deque[tuple[TreeSpec, list[Any]]]] = {}

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Around a forward and around its recompute, as torch's checkpoint wants them."""
        return _Keeping(self), _Replaying(self)

    def save(self) -> None:
        """Behind the forward, outside the checkpoint: hands what was found to autograd."""
        if not self._found:
            return
        anchor = torch.empty(0, requires_grad=True)
        # Kept whole: a node whose result is gone gives up what it saved (torch 2.11).
        out: Any = _Saved.apply(anchor, *self._found)  # type: ignore[no-untyped-call]
        self._found, self._saved = [], lambda: out.grad_fn.saved_tensors

    def keeps(self, op: torch._ops.OpOverload) -> bool:
        """Whether the op's results are kept."""
        return _is_kept(self._points, op)

    def keep(self, op: torch._ops.OpOverload, result: Any) -> None:
        """Notes what one call of the op gave."""
        leaves, form = tree_flatten(result)
        numbered: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                numbered.append(_Number(len(self._found)))
                # Apart from the graph, which the result joins as soon as this returns.
                self._found.append(leaf.detach())
            else:
                numbered.append(leaf)
        self._results.setdefault(op, deque()).append((form, numbered))

    def take(self, op: torch._ops.OpOverload) -> Any:
        """What the next call of the op gave in the forward."""
        if self._saved is not None:
            self._found, self._saved = list(self._saved()), None
        queue = self._results.get(op)
        assert queue, f"a recompute runs {op.name()} more often than its forward did"  # type: ignore[no-untyped-call]
        form, numbered = queue.popleft()
        leaves = [
            self._handed_out(leaf) if isinstance(leaf, _Number) else leaf for leaf in numbered
        ]
        return tree_unflatten(leaves, form)

    def _handed_out(self, number: int) -> Tensor:
        tensor = self._found[number]
        self._found[number] = _GONE
        return tensor


class _Number(int):
    """A tensor's place among those found."""


_GONE = torch.empty(0)


class _Saved(torch.autograd.Function):
    """A node that nothing flows through, for what it saves."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("no gradient comes here")


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._results.keeps(func):
            self._results.keep(func, result)
        return result


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._results.keeps(func):
            return self._results.take(func)
        return func(*args, **(kwargs or {}))


@cache
def _is_kept(kept: frozenset[str], op: torch._ops.OpOverload) -> bool:
    return is_kept(kept, op.name())  # type: ignore[no-untyped-call]
