"""What brings the tokens of a rank to their experts and the results back: the interface.

A MoE half routes and hands over; a `Dispatcher` does the rest, and is the only one that knows where
the experts lie. `AllHere` is the one without other ranks. `all_to_all.AllToAll` sends each row by
itself in plain PyTorch.

What every dispatcher keeps to:

- All ranks of its group run the same order of work and within `routed` and its backward the same
  exchanges in the same order, whatever is in a tensor: then no rank waits for ever (see
  `all_to_all`).
- What has been sent, received or multiplied comes out of registered ops `ppruntime::expert_*`.
  Checkpointing keeps their outputs by that name (`save_points.SavePoint.EXPERTS`): a recompute
  neither sends nor multiplies again. Without checkpointing it keeps no more than its backward
  reads.
- Weight gradients go to the layer's `queue` while that is deferring; they exchange nothing.
- `WireOptions` hold for each that sends anything.
- Buffers are made when the dispatcher is, not in a step.

How ranks reach each other is the runtime's: it fills `Exchange`. In this room a rank is a number
from 0 to P-1. Shape letters: N tokens, K experts per token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from ppruntime.models.expert_rows import expert_layout, to_rows, weighted_sum
from ppruntime.models.experts import Experts
from ppruntime.models.router import Routing

if TYPE_CHECKING:
    from ppruntime.models.fp8_experts import Fp8Experts

AnyExperts: TypeAlias = "Experts | Fp8Experts"
"""A layer's routed experts, or those held here. A dispatcher calls their `forward`, past any hook:
FSDP's, where it shards them by themselves, would run again in a recompute. Who shards them gathers
them before the whole unit runs."""

Finish: TypeAlias = Callable[[], None]
"""Waits for an exchange; on a device the current stream waits. To be called once."""


class Exchange(Protocol):
    """Rows between the ranks over which a layer's experts lie. Made by the runtime."""

    @property
    def name(self) -> str:
        """What ops are given for it; the same exchange may be made again under its name."""

    @property
    def rank(self) -> int:
        """This process, 0 to P-1."""

    @property
    def num_ranks(self) -> int:
        """P."""

    def begin(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], what: str) -> Finish:
        """Starts to send outgoing[p] to rank p and to fill incoming[p] from it, for every p; sizes
        agree by pairs. Neither may be touched before the returned function has run. Raises, here
        or there, an error that names the rank that does not take part and `what` it was to swap.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WireOptions:
    """How rows travel, and what is done meanwhile; for every dispatcher that sends any."""

    fp8: bool = False
    """Tokens go to their experts in FP8, see `fp8_wire`. Bitwise with FP8 experts that scale x by
    powers of two; changes numerics with others."""
    fp8_grad: bool = False
    """So do their outputs' gradients. Changes numerics."""
    weight_grads_after_combine: bool = False
    """The experts' weight gradients are computed while those of the tokens are on their way back,
    not before. Bitwise."""


class Dispatcher(Protocol):
    """Tokens to the experts of a layer and back; one for all layers of a stage."""

    def held(self, num_experts: int) -> range:
        """The experts of a layer that this rank has."""

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        """sum_k weight_nk expert_nk(x_n), [N, D] in fp32 or rounded to x's dtype, with gradients
        for x and the weights; those of `experts`, the ones held, go to their parameters. counts_E:
        rows for each expert.

        A collective of the group, and so is its backward. N may differ by rank and be 0.
        """


@runtime_checkable
class Checked(Protocol):
    """A dispatcher whose device may have waited in vain, which no call within a step says."""

    @property
    def outside_bytes(self) -> int:
        """Device memory that it holds beside torch's allocator."""

    def check(self) -> None:
        """After the last layer of a step or an evaluation, before its gradients or losses are
        used: raises, alike on all ranks of the group. The host waits for the device. A collective.
        """


def check_waits(dispatchers: Iterable[Dispatcher]) -> None:
    """Raises what the device of one of these has given up on, before anything is made of what it
    computed. A collective of their groups; whoever runs layers calls it behind the last one, whose
    waits no later forward would tell of."""
    for dispatcher in dispatchers:
        if isinstance(dispatcher, Checked):
            dispatcher.check()


class AllHere:
    """Every expert is on this rank: nothing is sent."""

    def held(self, num_experts: int) -> range:
        return range(num_experts)

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        if not isinstance(experts, Experts):
            return experts.forward(x_ND, routing.experts_NK, routing.weights_NK)
        layout = expert_layout(routing.experts_NK)
        y_RD = experts.forward(to_rows(x_ND, layout), _on_host(counts_E))
        return weighted_sum(y_RD, routing.weights_NK, layout)


def _on_host(counts_E: Tensor) -> Sequence[int]:
    """The readable path waits for the device here; grouped kernels do not need to."""
    if counts_E.is_meta:
        return [0] * len(counts_E)  # shapes are all that is asked there
    counts: list[int] = counts_E.tolist()
    return counts
