"""A forward of one micro-batch beside a backward of another, on two streams, through one routed
layer over the GPUs of a host: `ppruntime bench moe --ranks 2 --pairs --out FILE`.

What pairs that overlap do in a step (`schedules.lanes`), with experts alone: each of two
micro-batches has a dispatcher and a lane of its own; in a timed run both go forward and both go
back, the forward of the one beside the backward of the other. `in turn` does the same on one
stream. Multiprocessors are split between the products of the halves in several ways. Every way has
to give the bits of `in turn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from ppruntime.lanes import Lanes, OneLane, open_lanes
from ppruntime.launch.bench_moe_record import Row
from ppruntime.models.dispatch import check_waits
from ppruntime.models.router import Routing

if TYPE_CHECKING:
    from ppruntime.launch.bench_moe_ranks import Bench, Layer, Variant

USUAL = ("triton, mega_moe", "deep_gemm + deep_ep, FP8 rows")
"""Variants that are measured where none is named."""
Split: TypeAlias = tuple[int, int]
"""Multiprocessors for the products of the forward, and of the backward."""


def splits(num_sms: int, *, must_share: bool) -> list[Split]:
    """All for both, unless the two have to share them; then halves, and a third for either."""
    half, third = num_sms // 2, num_sms // 3
    shared = [(half, half), (2 * third, third), (third, 2 * third)]
    return shared if must_share else [(num_sms, num_sms), *shared]


class PairedLayer:
    """Two micro-batches of one rank through one layer."""

    def __init__(self, bench: Bench, layers: tuple[Layer, Layer]) -> None:
        self._bench, self._layers = bench, layers
        # Leaves of their own: autograd adds a leaf's gradient on the stream that first used it.
        self._x = [bench.x.detach().roll(k, 0).requires_grad_() for k in range(2)]
        mine = bench.routing
        weights = [mine.weights_NK.detach().clone().requires_grad_() for _ in range(2)]
        self._routings = [Routing(mine.experts_NK, w, w) for w in weights]
        self._y: dict[int, Tensor] = {}
        self._one: Lanes = OneLane()
        self._two = open_lanes((0, 1), bench.ranks.device, overlap=True)

    def prepare(self, *, overlap: bool) -> None:
        """Micro-batch 1 goes forward, on its lane: all that a run finds there is in its memory."""
        self._y.clear()
        for leaf in (*self._x, *(routing.weights_NK for routing in self._routings)):
            leaf.grad = None
        self._bench.synchronize()
        lanes = self._two if overlap else self._one
        with lanes.step():
            lanes.enter(1, (1,))
            self._forward(1)
        self._bench.synchronize()

    def run(self, *, overlap: bool, split: Split | None) -> None:
        """Two pairs. None: each product may have all multiprocessors."""
        lanes = self._two if overlap else self._one
        for_forward, for_backward = split or (None, None)
        with lanes.step():
            for forward, backward in ((0, 1), (1, 0)):
                lanes.enter(backward, (backward, forward))
                self._bench.limit(for_backward)
                self._backward(backward)
                lanes.enter(forward, ())
                self._bench.limit(for_forward)
                self._forward(forward)
        self._bench.limit(None)

    def results(self, *, overlap: bool, split: Split | None) -> list[Tensor]:
        """What a run leaves, on the device: an output, and all gradients."""
        grads = self._bench.zeroed_weight_grads()
        self.prepare(overlap=overlap)
        self.run(overlap=overlap, split=split)
        self._bench.synchronize()
        check_waits(layer.dispatcher for layer in self._layers)
        found = [self._y[1].detach(), *grads]
        for leaf in (*self._x, *(routing.weights_NK for routing in self._routings)):
            assert leaf.grad is not None
            found.append(leaf.grad)
        return [tensor.clone() for tensor in found]

    def _forward(self, k: int) -> None:
        layer, counts_E = self._layers[k], self._bench.counts_E
        self._y[k] = layer.dispatcher.routed(layer.experts, self._x[k], self._routings[k], counts_E)

    def _backward(self, k: int) -> None:
        torch.autograd.backward(self._y.pop(k), self._bench.grad)


def measure(bench: Bench, variants: Sequence[Variant], num_sms: int) -> None:
    """Every variant in turn and beside itself: times, ratios to `in turn`, and whether a bit
    differs. A collective."""
    rows_there = bench.x.shape[0] * bench.dims.experts_per_token
    flops = 2 * 3 * 6.0 * rows_there * bench.dims.hidden_size * bench.dims.expert_width
    for variant in variants:
        first, second = (bench.layer(variant, stage=k) for k in range(2))
        if first is None or second is None:
            continue
        paired = PairedLayer(bench, (first, second))
        must_share = first.config.moe.dispatch.type == "mega_moe"
        ways = splits(num_sms, must_share=must_share)
        expected = paired.results(overlap=False, split=None)
        for split in ways:
            # In turn first: what loads a kernel may wait for the whole GPU, and so for a peer.
            for overlap in (False, True):
                found = paired.results(overlap=overlap, split=split)
                differing = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                how = "at once" if overlap else "in turn"
                name = f"{variant.name}, {split[0]}/{split[1]} {how}: results that differ"
                bench.check(name, bench.most(float(differing)), 0)
        del expected, found
        _time(bench, variant, paired, ways, flops)


def _time(
    bench: Bench, variant: Variant, paired: PairedLayer, ways: Sequence[Split], flops: float
) -> None:
    rows: dict[Split | None, Row] = {None: Row("pairs", "in turn", variant.name, flops, 0)}
    for split in ways:
        rows[split] = Row("pairs", f"{split[0]}/{split[1]}", variant.name, flops, 0)
    for repetition in range(-2, bench.repetitions):
        for way, row in rows.items():
            overlap = way is not None
            paired.prepare(overlap=overlap)
            run = partial(paired.run, overlap=overlap, split=way)
            slowest = bench.most(bench.milliseconds(run))
            if repetition >= 0:
                row.milliseconds.append(slowest)
    in_turn = rows[None].median
    for way, row in rows.items():
        if bench.speaks:
            print(row, flush=True)
        if way is not None:
            bench.notes.append(
                f"{variant.name}, pairs on {row.phase}: {row.median / in_turn:.3f} of in turn"
            )
    bench.rows += rows.values()
