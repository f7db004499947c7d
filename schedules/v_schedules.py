"""V-Half and V-Min: orders for two chunks a rank in a V that hold about a half and a third of the
activations of 1F1B.

Both repeat one building block every six slots, a slot being one F, I or W of a chunk. The block's
offsets decide how long an activation lives; the rest is packing: weight gradients go into free
slots, then the ends of the order are pulled together.
Source: Qi et al., Pipeline Parallelism with Controllable Memory (2024), sections 3 and 4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ppruntime.schedules.ops import Kind, Op

_PERIOD = 6


def v_half(num_ranks: int, num_micro_batches: int) -> list[list[Op]]:
    """All ranks' orders; at most P + 2 chunk activations on a rank (P + 1 if P is odd): half of
    1F1B's on rank 0 and one more."""
    shift = 3 if num_ranks % 2 == 0 else 0  # else two ops of a rank would fall on one slot

    def offsets(rank: int) -> tuple[int, int, int, int]:
        return (
            2 * rank,
            3 * num_ranks - rank - 2,
            3 * num_ranks + shift + 2 * rank - 1,
            6 * num_ranks + shift - rank - 2,
        )

    return _pack(num_ranks, num_micro_batches, offsets)


def v_min(num_ranks: int, num_micro_batches: int) -> list[list[Op]]:
    """All ranks' orders; at most 2 ceil((P + 2) / 3) chunk activations on a rank: a third of
    1F1B's on rank 0 and one more."""
    shift = 2 if num_ranks % 3 == 0 else 0

    def offsets(rank: int) -> tuple[int, int, int, int]:
        return (
            rank,
            2 * num_ranks - rank - 1,
            2 * num_ranks + shift + rank,
            4 * num_ranks + shift - rank - 1,
        )

    return _pack(num_ranks, num_micro_batches, offsets)


def _pack(
    num_ranks: int,
    num_micro_batches: int,
    offsets: Callable[[int], tuple[int, int, int, int]],
) -> list[list[Op]]:
    """The block for every micro-batch, packed. `offsets(rank)`: slots of F0, F1, I1, I0."""
    table = _Table(num_ranks)
    for rank in range(num_ranks):
        up, down = rank, 2 * num_ranks - 1 - rank
        block = ((up, Kind.F), (down, Kind.F), (down, Kind.I), (up, Kind.I))
        for (stage, kind), offset in zip(block, offsets(rank), strict=True):
            for m in range(num_micro_batches):
                table.put(rank, offset + _PERIOD * m, Op(stage, kind, m))
        table.fill_with_weight_gradients(rank)
    table.pull_earlier(table.ops_by_slot(), max(map(table.peak, range(num_ranks))))
    table.repack_cool_down(num_micro_batches)
    return [[op for _, op in sorted(table.op_at[rank].items())] for rank in range(num_ranks)]


class _Table:
    """Who does what in which slot. `op_at[rank][slot]` and `slot_of[op]` say the same."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.op_at: list[dict[int, Op]] = [{} for _ in range(num_ranks)]
        self.slot_of: dict[Op, int] = {}

    def rank_of(self, op: Op) -> int:
        return min(op.stage, 2 * self.num_ranks - 1 - op.stage)

    def put(self, rank: int, slot: int, op: Op) -> None:
        assert slot not in self.op_at[rank], f"{op} and {self.op_at[rank][slot]} in one slot"
        self.op_at[rank][slot] = op
        self.slot_of[op] = slot

    def take_out(self, op: Op) -> None:
        del self.op_at[self.rank_of(op)][self.slot_of.pop(op)]

    def ops_by_slot(self) -> list[Op]:
        return sorted(self.slot_of, key=lambda op: (self.slot_of[op], self.rank_of(op)))

    def fill_with_weight_gradients(self, rank: int) -> None:
        """Each free slot takes the oldest W that waits."""
        ops = self.op_at[rank]
        waiting: deque[Op] = deque()
        slot, end = 0, max(ops)
        while slot <= end or waiting:
            op = ops.get(slot)
            if op is not None and op.kind is Kind.I:
                waiting.append(Op(op.stage, Kind.W, op.micro_batch))
            elif op is None and waiting:
                self.put(rank, slot, waiting.popleft())
            slot += 1

    def in_flight(self, rank: int) -> list[int]:
        """Activations held after each slot."""
        ops, held = self.op_at[rank], 0
        result = []
        for slot in range(max(ops) + 1):
            op = ops.get(slot)
            if op is not None:
                held += (op.kind is Kind.F) - (op.kind is Kind.W)
            result.append(held)
        return result

    def peak(self, rank: int) -> int:
        return max(self.in_flight(rank))

    def earliest(self, op: Op) -> int:
        """The first slot after what the op needs and after its like of the micro-batch before."""
        stage, kind, m = op.stage, op.kind, op.micro_batch
        needs = [Op(stage, kind, m - 1)] if m > 0 else []
        if kind is Kind.W:
            needs.append(Op(stage, Kind.I, m))
        elif kind is Kind.F and stage > 0:
            needs.append(Op(stage - 1, Kind.F, m))
        elif kind is Kind.I and stage == 2 * self.num_ranks - 1:
            needs.append(Op(stage, Kind.F, m))
        elif kind is Kind.I:
            needs.append(Op(stage + 1, Kind.I, m))
        return 1 + max((self.slot_of[need] for need in needs), default=-1)

    def pull_earlier(self, ops: list[Op], cap: int) -> None:
        """Moves each op, in turn, to the first free slot that it may have and at which its rank
        holds no more than `cap` activations."""
        held = [self.in_flight(rank) for rank in range(self.num_ranks)]
        for op in ops:
            rank, now = self.rank_of(op), self.slot_of[op]
            taken = self.op_at[rank]
            change = (op.kind is Kind.F) - (op.kind is Kind.W)
            for slot in range(self.earliest(op), now):
                if slot in taken:
                    continue
                if change > 0 and max(held[rank][slot:now]) >= cap:
                    continue
                self.take_out(op)
                self.put(rank, slot, op)
                for between in range(slot, now):
                    held[rank][between] += change
                break

    def repack_cool_down(self, num_micro_batches: int) -> None:
        """Behind each rank's last forward: gradients for inputs as early as they can be, then the
        weight gradients in the slots that are left. No forward follows: nothing more is held."""
        cool_down: list[Op] = []
        for rank in range(self.num_ranks):
            last = Op(2 * self.num_ranks - 1 - rank, Kind.F, num_micro_batches - 1)
            cool_down += [op for s, op in self.op_at[rank].items() if s > self.slot_of[last]]
        cool_down.sort(key=lambda op: (self.slot_of[op], self.rank_of(op)))
        weights = [op for op in cool_down if op.kind is Kind.W]
        for op in weights:
            self.take_out(op)
        cap = 2 * self.num_ranks * num_micro_batches
        self.pull_earlier([op for op in cool_down if op.kind is Kind.I], cap)
        for op in weights:
            slot = self.earliest(op)
            while slot in self.op_at[self.rank_of(op)]:
                slot += 1
            self.put(self.rank_of(op), slot, op)
