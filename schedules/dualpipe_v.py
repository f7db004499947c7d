"""DualPipeV: two chunks a rank in a V, a forward of one chunk beside a backward of the other.

Source: DeepSeek-V3 technical report (2024), section 3.2.1, and Sea AI Lab's cut-in-half form of it.
"""

from __future__ import annotations

from ppruntime.schedules.ops import Step
from ppruntime.schedules.order_writer import OrderWriter


def dualpipe_v(rank: int, num_ranks: int, num_micro_batches: int) -> list[Step]:
    """One rank's order; at most 2 P + 1 chunk activations in flight on every rank.

    Steady state is pairs, so that the expert all-to-all of one half runs under the other's compute.
    Whoever runs the order decides whether to fuse them: a fused pair waits for both its inputs,
    which with no gain from overlap doubles the bubble. Needs 2 P micro-batches.
    """
    assert num_micro_batches >= 2 * num_ranks, "fewer do not fill the pipeline from both ends"
    order = OrderWriter((rank, 2 * num_ranks - 1 - rank))
    num_behind = num_ranks - 1 - rank  # ranks between this one and the turn of the V
    for _ in range(2 * num_behind):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(num_behind):
        order.input_gradient(1)
        order.oldest_weight_gradient()
        order.forward(1)
    for i in range(num_micro_batches - 2 * num_ranks + rank + 1):
        if i == 0 and num_behind == 0:  # its two inputs are a forward apart: no pair
            order.forward(0)
            order.backward(1)
        else:
            order.forward_and_backward(0, 1)
        order.forward_and_backward(1, 0)
    for _ in range(num_behind):
        order.backward(1)
        order.forward_and_backward(1, 0)
    _cool_down(order, rank, num_behind)
    return order.steps


def _cool_down(order: OrderWriter, rank: int, num_behind: int) -> None:
    """The backwards that are left. Half-way their weight gradients start to wait, and then fill the
    gaps in which this rank waits for gradients of the ranks behind it."""
    num_whole = rank + 1  # of 2 (rank + 1) backwards, chunks 1 and 0 in turn
    for i in range(2 * (rank + 1)):
        chunk = 1 - i % 2
        if i < num_whole:
            order.backward(chunk)
        else:
            order.input_gradient(chunk)
    for _ in range(num_behind):
        order.oldest_weight_gradient()
        order.input_gradient(0)
    for _ in range(rank + 1):
        order.oldest_weight_gradient()
