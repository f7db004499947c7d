"""Dispatcher that sends a token once to a rank, in chunks beside the experts: `deep_ep`.

One op does it all for a micro-batch: each of some chunks of tokens is sent, goes through the
experts and comes back, and while one is computed the next is on its way:

    transfers   send 0 | send 1    back 0 | send 2   back 1 |           back 2
    computing            experts 0          experts 1         experts 2

Autograd sees one node, whose backward goes the same way with the outputs' gradients. All that the
backward needs comes out of the op, so checkpointing that keeps `expert_*` ops keeps it: a recompute
neither sends nor multiplies.

Against `all_to_all` a token's results of one rank are summed there, rounded to its dtype and then
summed over ranks: summation order in fp32, rounding in bf16. FP8 experts' weight gradients are
bitwise the same with one chunk; each chunk is a sum of its own. Why no rank waits for ever: see
`all_to_all`; every rank makes as many calls as there are chunks, whatever its tokens. Shape
letters: N tokens here, S tokens received, K experts per token, L experts here, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ppruntime.models.dispatch import AnyExperts, WireOptions
from ppruntime.models.experts import Experts
from ppruntime.models.fp8_wire import WireRows, to_wire
from ppruntime.models.router import Routing
from ppruntime.models.token_buffer import Arrived, Pending, TokenBuffer
from ppruntime.models.token_experts import InComputeDtype, TokenExperts

_DISPATCHERS: WeakValueDictionary[int, TokenDispatcher] = WeakValueDictionary()
_EXPERTS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
"""By `id`: ops take numbers, not objects."""


class TokenDispatcher:
    """One copy of a token per rank that has experts of it, `num_chunks` transfers a micro-batch."""

    def __init__(self, buffer: TokenBuffer, wire: WireOptions, *, num_chunks: int = 1) -> None:
        self.buffer, self.wire, self.num_chunks = buffer, wire, num_chunks
        _DISPATCHERS[id(self)] = self

    def held(self, num_experts: int) -> range:
        share = num_experts // self.buffer.num_ranks
        return range(self.buffer.rank * share, (self.buffer.rank + 1) * share)

    def routed(
        self, experts: AnyExperts, x_ND: Tensor, routing: Routing, counts_E: Tensor
    ) -> Tensor:
        _EXPERTS[id(experts)] = experts
        y_ND: Tensor = _Routed.apply(  # type: ignore[no-untyped-call]
            x_ND,
            routing.weights_NK,
            experts.gate_up.weight,
            experts.down.weight,
            routing.experts_NK,
            len(counts_E),
            self,
            experts,
        )
        return y_ND

    def chunks(self, x: Tensor) -> list[Tensor]:
        """Parts of [N, ...], as even as can be; some may be empty."""
        return [part.contiguous() for part in torch.tensor_split(x, self.num_chunks)]

    def wire_chunks(self, x_ND: Tensor, fp8: bool) -> list[WireRows]:
        """The same, as they travel. All are rounded before any is sent: a part's transfer may then
        begin although the experts of the part before are still computing."""
        if not fp8:
            return [*self.chunks(x_ND)]
        data, scale = to_wire(x_ND)
        return [*zip(self.chunks(data), self.chunks(scale), strict=True)]

    def functions(self, experts: AnyExperts) -> TokenExperts:
        """The experts as functions of tensors."""
        return InComputeDtype(experts) if isinstance(experts, Experts) else experts

    def forward(
        self, experts: AnyExperts, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor, num: int
    ) -> list[Tensor]:
        """y, then per chunk what `_Kept` names; `num` experts in all."""
        functions, buffer = self.functions(experts), self.buffer
        weights, dtype = functions.prepared(), x_ND.dtype
        rows = self.wire_chunks(x_ND, self.wire.fp8)
        expert_parts, weight_parts = self.chunks(expert_NK), self.chunks(weight_NK)
        begun = buffer.now()

        def send(index: int) -> Pending[Arrived]:
            return buffer.dispatch(
                rows[index], expert_parts[index], weight_parts[index], num, after=begun
            )

        coming, outputs = send(0), list[Tensor]()
        going: list[Pending[tuple[Tensor, Tensor | None]]] = []
        for index in range(self.num_chunks):
            arrived = coming()
            y_SD, *kept = functions.over_tokens(
                arrived.x, arrived.expert_SK, arrived.weight_SK, weights, arrived.counts, dtype
            )
            ready = buffer.now()
            if index + 1 < self.num_chunks:
                # Before what goes back, whose sender has to wait for the experts first.
                coming = send(index + 1)
            going.append(buffer.combine(y_SD, arrived.handle, None, after=ready))
            outputs += _Kept.of(arrived, kept).tensors()
        return [_joined([finish()[0] for finish in going]), *outputs]

    def backward(
        self, experts: AnyExperts, weights: Any, grad_ND: Tensor, outputs: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Gradients of x and of the routing weights; those of the weights are put."""
        functions, buffer = self.functions(experts), self.buffer
        dtype, kept = grad_ND.dtype, _Kept.split(outputs, self.num_chunks)
        rows = self.wire_chunks(grad_ND, self.wire.fp8_grad)
        begun = buffer.now()

        def send(index: int) -> Pending[WireRows]:
            return buffer.again(rows[index], kept[index].handle, after=begun)

        coming = send(0)
        going: list[Pending[tuple[Tensor, Tensor | None]]] = []
        late: list[Callable[[], None]] = []
        for index, part in enumerate(kept):
            grad_x_SD, grad_weight_SK, operands = functions.over_tokens_backward(
                coming(), part.expert_SK, part.weight_SK, weights, part.rest, part.counts, dtype
            )
            ready = buffer.now()
            if index + 1 < self.num_chunks:
                coming = send(index + 1)
            if experts.gate_up.weight.requires_grad:
                late.append(partial(functions.put_weight_grads, operands))
            if late and not self.wire.weight_grads_after_combine:
                late.pop()()
                ready = buffer.now()
            going.append(buffer.combine(grad_x_SD, part.handle, grad_weight_SK, after=ready))
        for task in late:
            task()
        results = [finish() for finish in going]
        grad_weights = [weight for _, weight in results if weight is not None]
        return _joined([x for x, _ in results]), _joined(grad_weights)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


class _Kept(NamedTuple):
    """What a chunk's backward takes."""

    expert_SK: Tensor
    weight_SK: Tensor
    counts_L: Tensor
    """int64, on the host."""
    handle: tuple[Tensor, ...]
    rest: tuple[Tensor, ...]
    """The experts' own."""

    @classmethod
    def of(cls, arrived: Arrived, kept: Sequence[Tensor]) -> _Kept:
        counts_L = torch.tensor(arrived.counts, dtype=torch.int64)
        return cls(arrived.expert_SK, arrived.weight_SK, counts_L, arrived.handle, tuple(kept))

    @property
    def counts(self) -> list[int]:
        found: list[int] = self.counts_L.tolist()
        return found

    def tensors(self) -> list[Tensor]:
        """All, after a word on the host that says how many of them are the handle."""
        size = torch.tensor(len(self.handle))
        return [size, self.expert_SK, self.weight_SK, self.counts_L, *self.handle, *self.rest]

    @classmethod
    def split(cls, outputs: Sequence[Tensor], num_chunks: int) -> list[_Kept]:
        """Back from the `tensors` of all chunks."""
        each, found = len(outputs) // num_chunks, []
        for start in range(0, len(outputs), each):
            size, expert, weight, counts, *others = outputs[start : start + each]
            end = int(size)
            found.append(cls(expert, weight, counts, (*others[:end],), (*others[end:],)))
        return found


@torch.library.custom_op("ppruntime::expert_tokens", mutates_args=())
def _forward_op(
    x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor, num: int, dispatcher: int, experts: int
) -> list[Tensor]:
    """All that `TokenDispatcher.forward` gives. One op, so that selective checkpointing can keep
    its outputs."""
    layer: Any = _EXPERTS[experts]
    return _DISPATCHERS[dispatcher].forward(layer, x_ND, experts_NK, weights_NK, num)


class _Routed(torch.autograd.Function):
    """The op with its gradient. The weights come along so that autograd asks for a backward where
    only they need one; their gradients are added to `.grad` on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weights_NK: Tensor,
        gate_up: Tensor,
        down: Tensor,
        experts_NK: Tensor,
        num: int,
        dispatcher: TokenDispatcher,
        experts: AnyExperts,
    ) -> Tensor:
        y_ND, *outputs = torch.ops.ppruntime.expert_tokens(
            x_ND, experts_NK, weights_NK, num, id(dispatcher), id(experts)
        )
        ctx.save_for_backward(*outputs)
        ctx.dispatcher, ctx.experts = dispatcher, experts
        ctx.weights = dispatcher.functions(experts).prepared()
        result: Tensor = y_ND
        return result

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_weights = ctx.dispatcher.backward(
            ctx.experts, ctx.weights, grad_ND.contiguous(), ctx.saved_tensors
        )
        return grad_x, grad_weights, *(None,) * 6
