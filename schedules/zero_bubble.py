"""Orders with the backward split so that weight gradients fill what would be waiting time.

ZB-H1, ZB-H2 (one chunk), interleaved ZB1P (several) and ZB-V (two in a V).
Sources: Qi et al., Zero Bubble Pipeline Parallelism (2023); for ZB-V also Pipeline Parallelism with
Controllable Memory (2024). The papers write B for our I.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppruntime.schedules.one_f_one_b import alternate, interleaved_ops, one_f_one_b
from ppruntime.schedules.ops import Kind, Op, Step
from ppruntime.schedules.order_writer import OrderWriter


def zb_h1(rank: int, num_ranks: int, num_micro_batches: int) -> list[Op]:
    """1F1B whose weight gradients run `rank` backwards late: at most P micro-batches in flight on
    every rank, as on rank 0 of 1F1B, and with F = I = W a third of its bubble."""
    order = one_f_one_b(rank, num_micro_batches, num_ranks - 1 - rank)
    return delay_weights(order, rank)


def zb_h2(rank: int, num_ranks: int, num_micro_batches: int) -> list[Op]:
    """ZB-H1 with twice the warm-up and twice the delay: at most 2 P - 1 in flight on every rank,
    and with F = I = W no bubble but the ranks' different starts and ends."""
    order = one_f_one_b(rank, num_micro_batches, 2 * (num_ranks - 1 - rank))
    return delay_weights(order, 2 * rank)


def interleaved_zb1p(
    rank: int, num_ranks: int, stages_per_rank: int, num_micro_batches: int
) -> list[Op]:
    """ZB-H1 over `stages_per_rank` chunks in loop placement: at most P V chunk activations held.

    `num_micro_batches` has to be a multiple of `num_ranks` when there are several chunks.
    """
    forwards, backwards = interleaved_ops(rank, num_ranks, stages_per_rank, num_micro_batches)
    num_warmup = (stages_per_rank - 1) * num_ranks + num_ranks - 1 - rank
    return delay_weights(alternate(forwards, backwards, num_warmup=num_warmup), rank)


def delay_weights(order: Iterable[Op], num_backwards: int) -> list[Op]:
    """Splits each B and runs its W behind the I that comes `num_backwards` later on this rank; what
    is left at the end follows in turn. 0 gives I and W side by side."""
    result: list[Op] = []
    waiting: list[Op] = []
    done = 0
    for op in order:
        if op.kind is not Kind.B:
            result.append(op)
            continue
        result.append(Op(op.stage, Kind.I, op.micro_batch))
        waiting.append(Op(op.stage, Kind.W, op.micro_batch))
        if len(waiting) - done > num_backwards:
            result.append(waiting[done])
            done += 1
    return result + waiting[done:]


def zb_v(rank: int, num_ranks: int, num_micro_batches: int) -> list[Step]:
    """ZB-V: two chunks in a V, at most 2 P chunk activations in flight on every rank, and with
    F = I = W no bubble but the ranks' different starts and ends. Needs 2 P - 1 micro-batches.
    """
    assert num_micro_batches >= 2 * num_ranks - 1, "fewer do not fill the warm-up"
    order = OrderWriter((rank, 2 * num_ranks - 1 - rank))
    num_to_turn = num_ranks - rank  # this rank and those behind it, up to the turn of the V
    for _ in range(2 * num_to_turn - 1):
        order.forward(0)
    for _ in range(rank):
        order.forward(1)
        order.forward(0)
    for _ in range(num_to_turn):
        order.forward(1)
        order.split_backward(1)
    while order.num_forwards(1) < num_micro_batches:
        if order.num_forwards(0) < num_micro_batches:
            order.forward(0)
        order.split_backward(0)
        order.forward(1)
        order.split_backward(1)
    for _ in range(rank):
        order.input_gradient(0)
        order.input_gradient(1)
    for _ in range(num_to_turn):
        order.input_gradient(0)
        order.weight_gradient(0)
    order.weight_gradients_left(1)
    order.weight_gradients_left(0)
    return order.steps
