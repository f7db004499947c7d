"""The passes of the fused MoE layer, mega_moe.py: dispatch, experts and combine without an exchange
between them: ranks read each other's tokens and write each other's results.

    write x, pairs by expert, weights into the arena; counts into all ranks' arenas
    meet      plan the pool; find its rows
              pull them into it, in order                        \\ beside each other: a block is
              z = x W13^T                                        / multiplied once it is there
              h = p silu(min(g, l)) clamp(u)
              h W2^T, each row straight to its pair's place at its source
    meet      y = sum over k, fp32, k ascending

    write dy into the arena
    meet      pull it, in FP8 rounded on the way, beside d = dy W2
              dp, dg, du, h from z and d
              [dg | du] W13, each row to its pair's place; dp to its pair
    meet      dx = sum over k; weight gradients after that, or in the queue

In bf16 with the readable experts' parameters, or in FP8 with `Fp8Experts`, whose rows then travel
in FP8: the scales are the same wherever x is quantised. Every row has one place and every sum one
order, so nothing depends on timing; pools are in the order of one process that has all ranks'
tokens one after another, and with it the FP8 experts agree bitwise in all.

The device waits for no host. A pool gets room before its rows are known: a fair share, or what the
layer lately took and a little more; and every rank tells its room with its counts. So from the same
numbers all devices know whether every pool takes what comes: if so they go on, else the pass runs
empty. The host enqueues the whole forward and reads the numbers after that, while the device
multiplies. It cuts what is kept to the rows there are. Where a pool was too small all ranks run the
passes again in pools of the right size, so any routing works; one that `capacity_factor` forbids
raises alike on all ranks, before a row has moved.

No rank waits for ever: all device waits are bounded (`kernels.mega_moe`), and what a rank gave up
on goes out with the next counts, so that all ranks raise alike; `check` asks after a step's last
layer. Shape letters: N tokens here, K experts per token, E experts, L experts here, P ranks, R pool
rows, D model width, F inner width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy
import torch
from torch import Tensor

from ppruntime.models.dispatch import Exchange
from ppruntime.models.fp8_experts import ExpertWeights, MicroBatch
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.models.kernels.mega_moe import (
    FoundRows,
    PulledRows,
    empty_pool,
    find_rows,
    pull_rows,
    push_values,
)
from ppruntime.models.kernels.mega_moe_gemm import Helpers, Homes, Ready, mega_gemm
from ppruntime.models.kernels.mega_moe_swiglu import swiglu_bf16, swiglu_bf16_backward
from ppruntime.models.kernels.moe_layout import Layout, expert_layout, gather_sum
from ppruntime.models.kernels.quantize import (
    GROUP,
    Quantized,
    pool_rows_like,
    quantize_routed,
    quantize_rows,
    transpose_blocks,
)
from ppruntime.models.kernels.swiglu import swiglu, swiglu_backward
from ppruntime.models.mega_moe_arena import Arena, error_text
from ppruntime.models.mega_moe_plan import PoolPlan, make_plan, pool_rows, unpacked
from ppruntime.models.mega_moe_rules import (
    MeetingError,
    most_pool_rows,
    room_after,
    told_words,
)

T = TypeVar("T")
Steps: TypeAlias = Generator[Tensor | None, Tensor | None, T]
"""A pass of one rank. It yields None where all ranks have to meet, or numbers [...], to be sent
[P, ...] of all ranks on the host."""
Matrices: TypeAlias = "tuple[Quantized, Quantized] | tuple[Tensor, Tensor]"
"""Weights of gate and up [L, 2F, D], and of down [L, D, F]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegaMoeOptions:
    """How rows travel. Unless said otherwise an option changes no bit."""

    num_sms: int = 20
    """Multiprocessors that pull rows; the products that run beside it take the others."""
    gemm_sms: GemmSms = field(default_factory=GemmSms, compare=False)
    """Multiprocessors for all of it, as when it is enqueued."""
    capacity_factor: float | None = None
    """Most rows of a rank over its fair share, see `mega_moe_plan`; None: whatever comes."""
    fp8_grad: bool = False
    """FP8 experts: gradients travel in FP8 too, with power-of-two scales. Changes numerics."""


class Kept(NamedTuple):
    """What a forward leaves to its backward."""

    z_RC: Tensor | None
    """What the first product gave; None: to be computed again."""
    rows: Tensor
    """x in the pool, bf16 or E4M3."""
    scale_RG: Tensor
    """Scales of E4M3 rows; empty in bf16."""
    home_R: Tensor
    pair_R: Tensor
    weight_R: Tensor
    place_NK: Tensor
    """int32 place of each pair; -1 where it is routed nowhere."""
    packed: Tensor
    """The plan, see `mega_moe_plan.unpacked`."""
    rows_L: Tensor
    """On the host: pool rows of each expert here, padding included."""


class _Tried(NamedTuple):
    """A pool and what the passes over it made, whatever its size."""

    z_RC: Tensor
    pool: PulledRows
    found: FoundRows
    packed: Tensor


class Gradients(NamedTuple):
    """What a backward gives."""

    x_ND: Tensor
    weights_NK: Tensor
    operands: MicroBatch | Bf16MicroBatch
    """Of the weight gradients."""


class Bf16MicroBatch(NamedTuple):
    """What the weight gradients of one micro-batch are computed from, all in the pool."""

    x_RD: Tensor
    gate_up_grad_RC: Tensor
    inner_RF: Tensor
    grad_RD: Tensor
    rows_L: Tensor


class Passes:
    """Forward and backward of one rank of an exchange, which carries error words; counts and rows
    go through the arena. Triton's kernels: on CUDA, or interpreted."""

    rooms: dict[int, int]
    """Rows that a layer's pool is given here before those that come are known, by the layer's
    number; none: a fair share."""

    def __init__(self, exchange: Exchange, arena: Arena, options: MegaMoeOptions) -> None:
        self.exchange, self.arena, self.options = exchange, arena, options
        device = arena.error.device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # Of high priority: what it pulls is waited for.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        words = exchange.num_ranks * told_words(arena.shape.num_experts) + 1
        self._words = torch.empty(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.rooms = {}

    def check(self) -> None:
        """Raises MeetingError if a wait on the device took too long. A collective; the host waits
        for the device. After the last layer of a step or an evaluation, before its gradients or
        losses are used."""
        codes_P1 = self._gather(self.arena.error)
        self._refuse(codes_P1[:, 0])

    def run(self, steps: Steps[T]) -> T:
        """Runs one pass together with the other ranks."""
        answer = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                result: T = done.value
                return result
            if asked is None:
                self.arena.meet()
                answer = None
            else:
                answer = self._gather(asked)

    def forward_steps(
        self,
        x_ND: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        matrices: Matrices,
        limit: float,
        *,
        power_of_two: bool,
        layer: int = 0,
    ) -> Steps[tuple[Tensor, Kept]]:
        """y [N, D], fp32 or, of FP8 experts, rounded to x's dtype as they round; and what the
        backward needs. experts_NK: counted over all ranks' experts, -1 for nowhere. `layer`: whose
        room the pool has at first."""
        arena, num_tokens = self.arena, len(x_ND)
        shape = arena.shape
        assert num_tokens <= shape.most_tokens, (num_tokens, shape)
        fp8 = isinstance(matrices[0], Quantized)
        dtype = x_ND.dtype if fp8 else torch.float32
        room = self._room(layer)
        lists = expert_layout(experts_NK, shape.num_experts)
        arena.order(lists.num_rows).copy_(lists.pair_P)
        arena.weights(num_tokens).copy_(weights_NK)
        self._write(x_ND, fp8=fp8, power_of_two=power_of_two)
        arena.tell(lists.count_E, room)
        yield None
        heard = arena.plan(room)
        read_words = self._copy_of(heard.words)
        tried = self._try(heard.packed, matrices, limit)
        yield None
        places = torch.arange(experts_NK.numel(), dtype=torch.int32, device=x_ND.device)
        place_NK = torch.where(experts_NK >= 0, places.view_as(experts_NK), -1)
        y_ND = self.summed(place_NK, dtype)
        # The device has work from here to the end of the forward: now the host may wait for it.
        *told, gave_up = read_words()
        told_PW = numpy.array(told).reshape(self.exchange.num_ranks, -1)
        counts_PE, errors_P, rooms_P = told_PW[:, :-2], told_PW[:, -2], told_PW[:, -1]
        if errors_P.any():
            codes_P1 = yield arena.error
            assert codes_P1 is not None
            self._refuse(codes_P1[:, 0])
        if gave_up:  # of a rank that did not come nothing is known; all will hear of it
            counts_PE = numpy.zeros_like(counts_PE)
        counts = torch.from_numpy(counts_PE)
        plan = make_plan(
            counts,
            self.exchange.rank,
            capacity_factor=self.options.capacity_factor,
            num_pairs=shape.most_pairs,
        )
        self._make_room(layer, plan.num_rows)
        if any(rows > there for rows, there in zip(pool_rows(counts), rooms_P, strict=True)):
            del tried, y_ND
            tried = self._try(_to_device(plan.packed(), x_ND.device), matrices, limit)
            yield None
            y_ND = self.summed(place_NK, dtype)
        return y_ND, _kept(tried, plan, place_NK)

    @property
    def _fair_share(self) -> int:
        """Rows of a pool, with a block per expert for padding, if all ranks had as many pairs as
        fit and every rank as many of them."""
        shape = self.arena.shape
        return most_pool_rows(1.0, shape.most_pairs, shape.num_experts // self.exchange.num_ranks)

    def _room(self, layer: int) -> int:
        """Rows that a layer's pool is given before those that come are known."""
        room = self.rooms.get(layer, self._fair_share)
        if (factor := self.options.capacity_factor) is not None:
            shape = self.arena.shape
            here = shape.num_experts // self.exchange.num_ranks
            room = min(room, most_pool_rows(factor, shape.most_pairs, here))
        return room

    def _make_room(self, layer: int, num_rows: int) -> None:
        """For as many rows the next time."""
        self.rooms[layer] = room_after(self._room(layer), num_rows, self._fair_share)

    def _try(self, packed: Tensor, matrices: Matrices, limit: float) -> _Tried:
        """The passes of a forward between its meetings, in a pool of as many blocks as `packed`."""
        arena = self.arena
        shape, num_ranks = arena.shape, self.exchange.num_ranks
        here = shape.num_experts // num_ranks
        gate_up, down = matrices
        found = find_rows(
            arena.peers,
            unpacked(packed, num_ranks, here),
            order_offset=shape.offset("order"),
            weights_offset=shape.offset("weights"),
            most_pairs=shape.most_pairs,
        )
        layout = self.pool_layout(packed, found.pair_R, here)
        fp8 = isinstance(gate_up, Quantized)
        z_RC, pool = self.pull_beside(found.home_R, gate_up, layout, fp8=fp8)
        if fp8:
            weight_R1 = found.weight_R.unsqueeze(1)
            inner: Quantized | Tensor = swiglu(z_RC, weight_R1, layout, limit, power_of_two=False)
        else:
            inner = swiglu_bf16(z_RC, found.weight_R, found.pair_R, limit)
        homes = self.homes(found.home_R)
        mega_gemm(inner, down, layout, homes=homes, gemm_sms=self.options.gemm_sms.now)
        return _Tried(z_RC, pool, found, packed)

    def _copy_of(self, words: Tensor) -> Callable[[], list[int]]:
        """Starts to copy numbers to the host; what it returns waits for them."""
        if self._stream is None:
            return words.tolist
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(words.device))
        with torch.cuda.stream(self._stream):  # beside the search for rows
            self._words.copy_(words, non_blocking=True)
            copied.record()
        words.record_stream(self._stream)

        def read() -> list[int]:
            copied.synchronize()
            numbers: list[int] = self._words.tolist()
            return numbers

        return read

    def backward_steps(
        self,
        grad_ND: Tensor,
        kept: Kept,
        weights: ExpertWeights | tuple[Tensor, Tensor],
        limit: float,
        *,
        dtype: torch.dtype,
        tile_scales: bool,
    ) -> Steps[Gradients]:
        """Gradients of x, in its `dtype`, and of the routing weights; operands of the others."""
        arena, sms = self.arena, self.options.gemm_sms.now
        fp8 = isinstance(weights, ExpertWeights)
        fp8_rows = fp8 and self.options.fp8_grad
        self._write(grad_ND, fp8=fp8_rows, power_of_two=True)
        yield None
        layout = self.pool_layout(kept.packed, kept.pair_R, len(kept.rows_L))
        z_RC = kept.z_RC
        if isinstance(weights, ExpertWeights):
            x8 = Quantized(kept.rows, kept.scale_RG)
            if z_RC is None:
                rows = Quantized(kept.rows, kept.scale_RG.t().contiguous())
                z_RC = _product(rows, weights.gate_up, layout, gemm_sms=sms)
            down_t = weights.down_t or transpose_blocks(weights.down)
            if fp8_rows:
                inner_grad_RF, pool = self.pull_beside(kept.home_R, down_t, layout, fp8=True)
                _, grad_columns = quantize_routed(
                    pool.by_row(), layout, with_rows=False, power_of_two=True,
                    tile_scales=tile_scales,
                )  # fmt: skip
            else:
                inner_grad_RF, pool = self.pull_beside(
                    kept.home_R, down_t, layout, fp8=False, quantize=True
                )
                _, grad_columns = quantize_routed(
                    pool.data_RC, layout, with_rows=False, power_of_two=False,
                    tile_scales=tile_scales,
                )  # fmt: skip
            del pool, down_t
            grads = swiglu_backward(
                z_RC, inner_grad_RF, kept.weight_R.unsqueeze(1), layout, limit, power_of_two=False
            )
            del z_RC, inner_grad_RF
            gate_up_t = weights.gate_up_t or transpose_blocks(weights.gate_up)
            mega_gemm(grads.rows, gate_up_t, layout, homes=self.homes(kept.home_R), gemm_sms=sms)
            weight_R = grads.weight_NK.flatten()
            operands: MicroBatch | Bf16MicroBatch = MicroBatch(
                x8, grad_columns, grads.inner_columns, grads.columns, layout
            )
            del gate_up_t, grads
        else:
            assert z_RC is not None
            gate_up, down = weights
            inner_grad_RF, pool = self.pull_beside(
                kept.home_R, down, layout, fp8=False, turned=True
            )
            wide = swiglu_bf16_backward(z_RC, inner_grad_RF, kept.weight_R, kept.pair_R, limit)
            del z_RC, inner_grad_RF
            homes = self.homes(kept.home_R)
            mega_gemm(wide.gate_up_RC, gate_up, layout, turned=True, homes=homes, gemm_sms=sms)
            weight_R = wide.weight_R
            operands = Bf16MicroBatch(
                kept.rows, wide.gate_up_RC, wide.inner_RF, pool.data_RC, kept.rows_L
            )
        shape = arena.shape
        push_values(
            arena.peers, kept.home_R, weight_R,
            offset=shape.offset("values"), most_pairs=shape.most_pairs,
        )  # fmt: skip
        yield None
        values_NK = arena.values(len(grad_ND))
        return Gradients(
            self.summed(kept.place_NK, dtype),
            torch.where(kept.place_NK >= 0, values_NK, 0),
            operands,
        )

    def _write(self, x_ND: Tensor, *, fp8: bool, power_of_two: bool) -> None:
        """Tokens into the arena, for the peers."""
        if fp8:
            out = self.arena.fp8_rows(len(x_ND))
            quantize_rows(x_ND, power_of_two=power_of_two, out=out)
        else:
            self.arena.rows(len(x_ND)).copy_(x_ND)

    def pull(
        self,
        home_R: Tensor,
        layout: Layout,
        pool: PulledRows,
        quantized: Quantized | None = None,
    ) -> None:
        """The rows that their ranks have written, into the pool."""
        shape = self.arena.shape
        pull_rows(
            self.arena.peers, home_R, layout.start_E1, pool,
            rows_offset=shape.offset("rows"), scales_offset=shape.offset("scales"),
            per_token=shape.per_token, most_pairs=shape.most_pairs,
            num_sms=self.options.num_sms, quantized=quantized,
        )  # fmt: skip

    def pull_beside(
        self,
        home_R: Tensor,
        weights: Quantized | Tensor,
        layout: Layout,
        *,
        fp8: bool,
        turned: bool = False,
        quantize: bool = False,
    ) -> tuple[Tensor, PulledRows]:
        """Pulls the rows and multiplies each block once it is there; with `quantize`, rows that
        come in bf16 are multiplied in FP8.

        The product leaves `num_sms` multiprocessors alone at first: its programs wait, and what
        they wait for must have room to run whichever of the two starts first. When the rows are
        there, more programs of it take these multiprocessors over.
        """
        pool = empty_pool(home_R, self.arena.shape.hidden, fp8=fp8)
        rows: Quantized | Tensor = pool.rows() if fp8 else pool.data_RC
        quantized = None
        if quantize:
            rows = quantized = pool_rows_like(pool.data_RC, *pool.data_RC.shape)
        ready = Ready(pool.flag_B, self.arena.peers)
        helpers = Helpers(pool.ticket_1, self.options.num_sms, self._stream)
        multiply = partial(
            mega_gemm, rows, weights, layout, turned=turned, ready=ready, helpers=helpers
        )
        if self._stream is None:
            self.pull(home_R, layout, pool, quantized)
            y_RO = multiply()
        else:
            device = home_R.device
            beside = self.options.gemm_sms.now
            if beside is None:
                beside = torch.cuda.get_device_properties(device).multi_processor_count
            beside = max(1, beside - self.options.num_sms)
            current = torch.cuda.current_stream(device)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                self.pull(home_R, layout, pool, quantized)
            y_RO = multiply(gemm_sms=beside)
            current.wait_stream(self._stream)
        assert y_RO is not None
        return y_RO, pool

    def homes(self, home_R: Tensor) -> Homes:
        """Where the pool's rows are sent: each to its pair's place."""
        shape = self.arena.shape
        return Homes(home_R, self.arena.peers, shape.offset("places"), shape.most_pairs)

    def summed(self, place_NK: Tensor, dtype: torch.dtype) -> Tensor:
        """What came to each token's places, added up."""
        by_place = Layout(place_NK, place_NK, place_NK, place_NK, place_NK)  # only row_NK is read
        return gather_sum(self.arena.places(len(place_NK)), by_place, dtype=dtype)

    def pool_layout(self, packed: Tensor, pair_R: Tensor, here: int) -> Layout:
        """The pool as the passes of `Fp8Experts` see it: every row a token of its own."""
        start_L1, count_L, _, _, expert_B = unpacked(packed, self.exchange.num_ranks, here)
        return Layout(pair_R, pair_R.unsqueeze(1), expert_B, start_L1, count_L)

    def _gather(self, told: Tensor) -> Tensor:
        """Everyone's numbers, [P, ...] on the host. The host waits for the device and the ranks."""
        here = told.cpu()
        everyones = here.new_empty(self.exchange.num_ranks, *here.shape)
        outgoing = [here] * self.exchange.num_ranks
        self.exchange.begin(outgoing, list(everyones), "numbers of rows")()
        return everyones

    def _refuse(self, codes_P: Tensor) -> None:
        if (text := error_text(codes_P.tolist(), self.arena.ranks)) is not None:
            raise MeetingError(text)


def _kept(tried: _Tried, plan: PoolPlan, place_NK: Tensor) -> Kept:
    """Of a pool, the rows that there are."""
    rows = plan.num_rows
    z_RC, pool, found, packed = tried
    num_spare = (len(z_RC) - rows) // GROUP
    scale_RG = pool.data_RC.new_empty(0, dtype=torch.float32)
    if pool.scale_RG is not None:
        scale_RG = pool.scale_RG[:rows]
    return Kept(
        z_RC[:rows],
        pool.data_RC[:rows],
        scale_RG,
        found.home_R[:rows],
        found.pair_R[:rows],
        found.weight_R[:rows],
        place_NK,
        packed[: len(packed) - num_spare],
        plan.start_L1.diff(),
    )


def _product(x: Quantized, weights: Quantized, layout: Layout, *, gemm_sms: int | None) -> Tensor:
    y_RO = mega_gemm(x, weights, layout, gemm_sms=gemm_sms)
    assert y_RO is not None
    return y_RO


def _to_device(numbers: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)
