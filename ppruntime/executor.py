"""Runs one rank's order: the only place where an op, a stage and a transport meet.

Each op of the order is bound once to a call with its stage, channels and micro-batch filled in; a
step is one loop over these calls. An op waits only for what it reads: a received boundary. Where
pairs overlap every op runs on its stage's lane, in the order of `schedules.lanes`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, Protocol

from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from ppruntime.activation_offload import ActivationOffload
from ppruntime.clocks import Clock, OpTimes
from ppruntime.gemm_budget import GemmBudget
from ppruntime.lanes import Lanes, OneLane
from ppruntime.master_moments import master_moments
from ppruntime.master_offload import MasterOffload
from ppruntime.memory_watch import MemoryWatch
from ppruntime.models.carry import MicroBatch
from ppruntime.schedules.lanes import LaneOp, lane_program
from ppruntime.schedules.ops import Kind, Op, Pair, Schedule, ScheduleError
from ppruntime.transports.base import Channel, Transport


class Computes(Protocol):
    """What the executor needs of a stage; `stage.Stage` is the real one."""

    index: int

    @property
    def num_in_flight(self) -> int: ...

    def forward(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]: ...

    def evaluate(
        self, micro_batch: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> tuple[Tensor, ...]: ...

    def backward(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]: ...

    def backward_input(self, micro_batch: int, grads: Sequence[Tensor]) -> tuple[Tensor, ...]: ...

    def weight_grads(self, micro_batch: int) -> None: ...


class LooksAhead(Protocol):
    """What reads ahead for stages; `engram_tables.EngramLookups` is the real one."""

    def begin(self, batches: Sequence[MicroBatch]) -> None: ...

    def before(self, ops: Sequence[Op]) -> Mapping[Op, Callable[[], None]]: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ports:
    """The channels of one stage; None at the pipeline's ends."""

    input: Channel | None
    output: Channel | None
    output_grad: Channel | None
    input_grad: Channel | None

    @classmethod
    def of(cls, stage: int, channels: Iterable[Channel]) -> _Ports:
        by_role = {(c.kind, c.src_stage, c.dst_stage): c for c in channels}
        return cls(
            input=by_role.get(("forward", stage - 1, stage)),
            output=by_role.get(("forward", stage, stage + 1)),
            output_grad=by_role.get(("backward", stage + 1, stage)),
            input_grad=by_role.get(("backward", stage, stage - 1)),
        )


class Executor:
    """One rank's part of a schedule, bound to its stages and to open channels.

    `schedule` is lowered (transfers and frees are ops of it) and checked. With `training` False
    the forwards run without gradients; the order then has no backward. An order that moves
    activations away (OFFLOAD, OFFLOADED, RELOAD) needs `offload`. `masters` are away for as long
    as the order does not need them. `lookups` hear of a step's micro-batches when it begins. With
    more than one of `lanes` the halves of `pairs` run at once; `budget` is told which is enqueued.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Mapping[int, Computes],
        channels: Sequence[Channel],
        transport: Transport,
        *,
        clock: Clock[Any],  # host and device stamps differ
        training: bool = True,
        offload: ActivationOffload | None = None,
        masters: MasterOffload | None = None,
        lookups: LooksAhead | None = None,
        lanes: Lanes | None = None,
        pairs: Iterable[Pair] = (),
        budget: GemmBudget | None = None,
    ) -> None:
        self._rank = rank
        self._transport = transport
        self._clock = clock
        self._stages = stages
        self._ports = {index: _Ports.of(index, channels) for index in stages}
        self._training = training
        self._offload, self._masters, self._lookups = offload, masters, lookups
        self._moved = {
            (op.stage, op.micro_batch) for op in schedule.ops(rank) if op.kind is Kind.OFFLOAD
        }
        self._batches: Sequence[MicroBatch] = ()
        self._outbox: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        self._lanes, self._budget = lanes or OneLane(), budget
        self._kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """Messages from one lane to another, until their FREE: see `schedules.lanes`."""
        self._times: list[OpTimes[Any]] = []
        self._ready = clock()
        self._stage_done: Callable[[int], None] | None = None
        ops = list(schedule.ops(rank))
        before, after = self._around(ops)
        steps = [LaneOp(op) for op in ops]
        self._enters: Iterable[Callable[[], None]] = repeat(_nothing)
        if self._lanes.overlap:
            steps = list(lane_program(ops, pairs))
            self._enters = tuple(partial(self._enter, step) for step in steps)
        self._program = tuple(
            (str(op), _joined(before.get(op), self._bind(op), after.get(op))) for op, *_ in steps
        )

    def run(
        self,
        batches: Sequence[MicroBatch],
        *,
        stage_done: Callable[[int], None] | None = None,
        watch: MemoryWatch | None = None,
    ) -> None:
        """Runs the order over `batches`, one entry per micro-batch. `stage_done` is called with
        each stage behind its last op; `watch` counts memory around every op.

        Losses and gradients are left in the stages, the ops' times in `op_times`. An error ends the
        transport for all ranks and carries the op it happened in.
        """
        self._batches, self._stage_done = batches, stage_done
        self._times = times = []
        clock = self._clock
        clock.start_step()
        text = "no op"
        try:
            if self._lookups is not None:
                self._lookups.begin(batches)
            program = self._labelled() if _profiler_enabled() else iter(self._program)
            acts = program if watch is None else watch.watched(program)
            with self._lanes.step():
                for (text, act), enter in zip(acts, self._enters, strict=False):
                    enter()
                    start = self._ready = clock()
                    act()
                    times.append(OpTimes(text, start, self._ready, clock()))
            self._transport.step_end()
        except BaseException as error:
            error.add_note(f"rank {self._rank} was in {text}")
            self._transport.abort(f"rank {self._rank} failed in {text}: {error}")
            raise
        finally:
            if self._budget is not None:
                self._budget.use(None)
        if self._lookups is not None:
            self._lookups.end()
        self._batches = ()
        assert not self._outbox, f"rank {self._rank} never sent {sorted(self._outbox)}"
        assert not self._kept, f"rank {self._rank} never freed {sorted(self._kept)}"
        for stage in self._stages.values():
            assert not stage.num_in_flight, f"stage {stage.index} has work left after the order"
        if self._offload is not None:
            assert not self._offload.num_held, f"rank {self._rank} has activations left over"

    def _enter(self, step: LaneOp) -> None:
        if self._budget is not None:
            self._budget.use(step.half)
        self._lanes.enter(step.op.stage, step.joins)

    def _labelled(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """The program for a profiler: each op in a range that bears its text, as NVTX has it too
        under `torch.autograd.profiler.emit_nvtx`."""

        def within(text: str, act: Callable[[], None]) -> None:
            with record_function(text):
                act()

        return ((text, partial(within, text, act)) for text, act in self._program)

    def op_times(self) -> list[OpTimes[int]]:
        """The ops of the last step in their order, in ns of `time.perf_counter_ns`. On a device
        this waits for the step to be done."""
        return self._clock.resolve(self._times)

    def _bind(self, op: Op) -> Callable[[], None]:
        stage, ports, m = self._stages[op.stage], self._ports[op.stage], op.micro_batch
        transport = self._transport
        match op.kind:
            case Kind.F:
                run = stage.forward if self._training else stage.evaluate
                return partial(self._forward, stage, run, ports, m)
            case Kind.B:
                return partial(self._backward, stage, stage.backward, ports, m)
            case Kind.I:
                return partial(self._backward, stage, stage.backward_input, ports, m)
            case Kind.W:
                return partial(stage.weight_grads, m)
            case Kind.SEND_F:
                return partial(self._send, _open(ports.output, op), m)
            case Kind.SEND_B:
                return partial(self._send, _open(ports.input_grad, op), m)
            case Kind.RECV_F:
                return partial(transport.post, _open(ports.input, op), m)
            case Kind.RECV_B:
                return partial(transport.post, _open(ports.output_grad, op), m)
            case Kind.FREE_F:
                return partial(self._free, _open(ports.input, op), m)
            case Kind.FREE_B:
                return partial(self._free, _open(ports.output_grad, op), m)
            case Kind.OFFLOAD:
                return partial(self._offload_for(op).offload, (op.stage, m))
            case Kind.OFFLOADED:
                return partial(self._offload_for(op).offloaded, (op.stage, m))
            case Kind.RELOAD:
                return partial(self._offload_for(op).reload, (op.stage, m))

    def _around(
        self, ops: Sequence[Op]
    ) -> tuple[Mapping[Op, Callable[[], None]], Mapping[Op, Callable[[], None]]]:
        """What is done before and after some ops, on behalf of a whole stage."""
        before: dict[Op, Callable[[], None]] = {}
        after: dict[Op, Callable[[], None]] = {
            op: partial(self._end_stage, op.stage) for op in _last_of_each_stage(ops)
        }
        if self._masters is not None:
            for stage in self._stages:
                if (moments := master_moments(ops, stage)) is not None:
                    after[moments.leave] = partial(self._masters.leave, stage)
                    left = partial(self._masters.left, stage)
                    before[moments.left] = _joined(before.get(moments.left), left)
                    back = partial(self._masters.come_back, stage)
                    if moments.back is None:
                        after[moments.through] = _joined(back, after.get(moments.through))
                    else:
                        before[moments.back] = _joined(before.get(moments.back), back)
        if self._lookups is not None:
            for op, look in self._lookups.before(ops).items():
                before[op] = _joined(before.get(op), look)
        return before, after

    def _end_stage(self, stage: int) -> None:
        if self._masters is not None:
            self._masters.arrive(stage)
        if self._stage_done is not None:
            self._stage_done(stage)

    def _offload_for(self, op: Op) -> ActivationOffload:
        if self._offload is None:
            raise ScheduleError(
                f"rank {self._rank}: {op} moves activations, and the executor was given no place"
                " for them"
            )
        return self._offload

    def _forward(
        self,
        stage: Computes,
        run: Callable[[int, Sequence[Tensor], MicroBatch], tuple[Tensor, ...]],
        ports: _Ports,
        m: int,
    ) -> None:
        received, batch = self._take(ports.input, m), self._batches[m]
        with self._collecting(stage, m, received, batch):
            outputs = run(m, received, batch)
        if ports.output is not None:
            self._outbox[ports.output.id, m] = outputs

    def _collecting(
        self, stage: Computes, m: int, received: Sequence[Tensor], batch: MicroBatch
    ) -> AbstractContextManager[None]:
        """Around a forward whose saved activations will be moved."""
        key = stage.index, m
        if self._offload is None or key not in self._moved:
            return nullcontext()
        return self._offload.collecting(key, (*received, *(x for x in batch if x is not None)))

    def _backward(
        self,
        stage: Computes,
        run: Callable[[int, Sequence[Tensor]], tuple[Tensor, ...]],
        ports: _Ports,
        m: int,
    ) -> None:
        grads = self._take(ports.output_grad, m)
        if self._offload is not None and (key := (stage.index, m)) in self._moved:
            self._offload.arrive(key)
            self._ready = self._clock()
        input_grads = run(m, grads)
        if ports.input_grad is not None:
            self._outbox[ports.input_grad.id, m] = input_grads

    def _take(self, channel: Channel | None, m: int) -> tuple[Tensor, ...]:
        if channel is None:
            return ()
        tensors = self._transport.take(channel, m)
        self._ready = self._clock()
        if self._lanes.overlap and channel.src_rank == channel.dst_rank:
            self._kept[channel.id, m] = tensors
        return tensors

    def _free(self, channel: Channel, m: int) -> None:
        self._kept.pop((channel.id, m), None)
        self._transport.release(channel, m)

    def _send(self, channel: Channel, m: int) -> None:
        self._transport.send(channel, m, self._outbox.pop((channel.id, m)))


def _nothing() -> None:
    pass


def _last_of_each_stage(ops: Iterable[Op]) -> Iterable[Op]:
    return {op.stage: op for op in ops}.values()


def _joined(*acts: Callable[[], None] | None) -> Callable[[], None]:
    """One call for those that are there."""
    given = [act for act in acts if act is not None]

    def act_all() -> None:
        for act in given:
            act()

    return given[0] if len(given) == 1 else act_all


def _open(channel: Channel | None, op: Op) -> Channel:
    if channel is None:
        raise ScheduleError(f"{op} needs a channel that the pipeline's end does not have")
    return channel
