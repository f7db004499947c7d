"""Writes down one rank's order chunk by chunk; the micro-batches count themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ppruntime.schedules.ops import Kind, Op, Pair, Step


class OrderWriter:
    """One rank's order while it is written. Each call takes the chunk's next micro-batch, so all
    orders written this way run every chunk's forwards, backwards and weight gradients ascending."""

    def __init__(self, stages: Sequence[int]) -> None:
        """`stages[c]` is the stage of the rank's chunk c."""
        self.steps: list[Step] = []
        self._stages = tuple(stages)
        self._num_forwards = [0] * len(stages)
        self._num_backwards = [0] * len(stages)
        self._waiting: deque[Op] = deque()
        """W's whose I was written, oldest first, over all chunks."""

    def num_forwards(self, chunk: int) -> int:
        """Forwards of a chunk written so far."""
        return self._num_forwards[chunk]

    def forward(self, chunk: int) -> None:
        """F."""
        self.steps.append(self._forward(chunk))

    def backward(self, chunk: int) -> None:
        """B, the whole backward."""
        self.steps.append(self._backward(chunk, Kind.B))

    def forward_and_backward(self, forward_chunk: int, backward_chunk: int) -> None:
        """F of one chunk and B of the other as a pair."""
        self.steps.append(
            Pair(self._forward(forward_chunk), self._backward(backward_chunk, Kind.B))
        )

    def input_gradient(self, chunk: int) -> None:
        """I; its W waits to be written."""
        gradient = self._backward(chunk, Kind.I)
        self.steps.append(gradient)
        self._waiting.append(Op(gradient.stage, Kind.W, gradient.micro_batch))

    def weight_gradient(self, chunk: int) -> None:
        """The chunk's oldest W that waits."""
        oldest = next(op for op in self._waiting if op.stage == self._stages[chunk])
        self._waiting.remove(oldest)
        self.steps.append(oldest)

    def split_backward(self, chunk: int) -> None:
        """I and its W side by side; none may be waiting."""
        self.input_gradient(chunk)
        self.weight_gradient(chunk)

    def oldest_weight_gradient(self) -> None:
        """The oldest W that waits on this rank, if any."""
        if self._waiting:
            self.steps.append(self._waiting.popleft())

    def weight_gradients_left(self, chunk: int) -> None:
        """All W's of a chunk that wait."""
        while any(op.stage == self._stages[chunk] for op in self._waiting):
            self.weight_gradient(chunk)

    def _forward(self, chunk: int) -> Op:
        m = self._num_forwards[chunk]
        self._num_forwards[chunk] += 1
        return Op(self._stages[chunk], Kind.F, m)

    def _backward(self, chunk: int, kind: Kind) -> Op:
        m = self._num_backwards[chunk]
        self._num_backwards[chunk] += 1
        return Op(self._stages[chunk], kind, m)
