"""The memory ledger: every byte of a rank in a named row, predicted over an order, and measured.

Pure; no torch. The plan's numbers (`memory`, `plan_report`) laid out by row and by op: what stays
through a step, and after every op what is held for backwards. `check_text` puts a run's measured
rows beside them, `out_of_memory_text` says what to change when a rank ran out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ppruntime.config.keys import Config
from ppruntime.experts.arena_bytes import arena_bytes
from ppruntime.master_moments import master_moments
from ppruntime.memory import (
    BackwardPeak,
    StateBytes,
    activation_bytes,
    backward_peak,
    gradient_bytes,
    head_bytes,
    holdings,
    put_off_sums,
    sharded_master_bytes,
    state_bytes,
    table_bytes,
)
from ppruntime.models.dims import unit_parameters
from ppruntime.models.parameters import Part
from ppruntime.offload_plan import master_bytes
from ppruntime.order import make_order
from ppruntime.plan import StagePlan, cut
from ppruntime.plan_report import StageReport, boundary_of, report, sent_bytes
from ppruntime.reduction_bytes import Reduction, reduction_end, reduction_peak
from ppruntime.schedules.ops import COMPUTE, Kind, Op
from ppruntime.text_table import short_bytes, text_table

UPDATE = "update"
"""Stands for all behind a step's last op: reduction, norm, update."""
WARM_UP = "warm-up"
"""Stands for the micro-batch that a stage computes before the first step."""
WEIGHTS, COPIES, ACCUMULATORS = "weights", "low-precision copies", "accumulators"
OPTIMIZER, SLOTS, SENT = "optimizer", "slots", "sent, not gone"
HEAD = "head's loss"


@dataclass(frozen=True, slots=True)
class Moment:
    """What a rank holds of its micro-batches while one op runs, or outside all ops."""

    op: str
    """Its text, `UPDATE` or `WARM_UP`."""
    activations: int
    """Kept from forwards for backwards, at the op's end if it is a forward; in a backward where
    there is the most, in put-off weight gradients at the start."""
    recompute: int
    """Made anew by the op's recompute."""
    masters_away: int = 0
    """Masters that are on the host meanwhile."""
    sums_to_come: int = 0
    """Gradient sums that no backward has begun to make."""
    workspaces: int = 0
    """What a backward's largest operation makes and frees again; buffers in which gradients are
    reduced."""
    head: int = 0
    """Logits and their gradients in the head's loss."""
    absent: Mapping[str, int] = field(default_factory=dict)
    """Other bytes of the rows that last through a step that are not there, by row."""

    @property
    def total(self) -> int:
        """Beyond the rows that last through a step."""
        made = self.activations + self.recompute + self.workspaces + self.head
        return made - self.masters_away - self.sums_to_come - sum(self.absent.values())


@dataclass(frozen=True, slots=True)
class RankLedger:
    """The predicted rows of one pipeline rank, in bytes, on the data rank with the most."""

    rank: int
    weights: int
    """What the units multiply with, in the compute dtype."""
    copies: int
    """Further copies of weights in a lower precision."""
    masters: int
    """fp32 masters that are apart from the weights."""
    accumulators: int
    """fp32 gradient sums."""
    optimizer: int
    """Moments."""
    slots: int
    """Receive buffers, and the arenas of dispatcher mega_moe."""
    sent: int
    """Messages that a transport of GPUs still holds where they were made."""
    resting_parameters: int
    """What parameters take between steps: the masters, and what is whole on every rank."""
    moments: tuple[Moment, ...]
    """One per computation of the rank's order, and the update behind them."""
    start: tuple[Moment, ...] = ()
    """Warm-ups of the rank's stages before the first step, which a GPU needs."""

    @property
    def through_the_step(self) -> int:
        """All rows that no op changes."""
        lasting = self.weights + self.copies + self.masters + self.accumulators
        return lasting + self.optimizer + self.slots + self.sent

    @property
    def peak(self) -> Moment:
        """The first moment with the most."""
        moments = (*self.moments, *self.start)
        return max(moments, key=lambda moment: moment.total, default=Moment("no op", 0, 0))

    @property
    def peak_bytes(self) -> int:
        return self.through_the_step + self.peak.total

    def rows(self) -> tuple[tuple[str, int], ...]:
        """Names and bytes of all rows at the peak."""
        peak = self.peak
        lasting = (
            (WEIGHTS, self.weights),
            (COPIES, self.copies),
            ("masters", self.masters - peak.masters_away),
            (ACCUMULATORS, self.accumulators - peak.sums_to_come),
            (OPTIMIZER, self.optimizer),
            (SLOTS, self.slots),
            (SENT, self.sent),
        )
        return (
            *((name, num_bytes - peak.absent.get(name, 0)) for name, num_bytes in lasting),
            ("activations in flight", peak.activations),
            ("made again", peak.recompute),
            ("workspaces", peak.workspaces),
            (HEAD, peak.head),
        )


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What one pipeline rank had in a step; None where the device does not count."""

    rank: int
    resting_parameters: int
    """Bytes of parameters between steps."""
    optimizer: int
    """Bytes of the optimizer's moments."""
    peak_bytes: int | None
    """The most bytes in live tensors during the step."""
    reserved_bytes: int | None
    """What the allocator held from the device at the most: live tensors and its slack."""


def predict(config: Config) -> tuple[RankLedger, ...]:
    """The ledger of every pipeline rank. Of workspaces the head's loss and the buffers of a
    reduction are predicted, other ops' and the allocator's slack are not: what a run measures above
    the peak is theirs."""
    order, plan = make_order(config).lowered, report(config)
    cuts = cut(
        config.model.dims,
        order.stage_to_rank,
        config.pp.layers_per_stage,
        seq_len=config.train.seq_len,
    )
    ledgers = []
    for rank in plan.ranks:
        own = [cuts[index] for index in rank.stages]
        state = {stage.index: state_bytes(config, stage) for stage in own}
        copies = sum(part.copies for part in state.values())
        masters = sum(sharded_master_bytes(config, stage) for stage in own)
        optimizer = sum(part.optimizer for part in state.values())
        ops = list(order.ops(rank.rank))
        ledger = RankLedger(
            rank=rank.rank,
            weights=rank.weight_bytes - copies,
            copies=copies,
            masters=masters,
            accumulators=rank.gradient_bytes,
            optimizer=optimizer - masters,
            slots=rank.slot_bytes,
            sent=sum(sent_bytes(config, cuts, stage) for stage in own),
            resting_parameters=masters
            + _unsharded_bytes(config, own, masters)
            + sum(table_bytes(config, s) for s in own if config.engram.tables == "device"),
            moments=tuple(_moments(config, ops, plan.stages, cuts, own, state)),
        )
        start = () if config.run.device == "cpu" else _warm_ups(config, ledger, cuts, own, state)
        ledgers.append(replace(ledger, start=tuple(start)))
    return tuple(ledgers)


def _unsharded_bytes(config: Config, stages: Sequence[StagePlan], masters: int) -> int:
    """Parameters that are their own masters: all without sharding, in bf16 the few fp32 ones."""
    is_sharded = masters > 0
    return sum(
        4 * prod(parameter.shape)
        for stage in stages
        for spec in stage.units
        for parameter in unit_parameters(config.model.dims, spec)
        if parameter.part is not Part.ENGRAM_TABLE
        and (not is_sharded or (parameter.fp32 and config.train.precision != "fp32"))
    )


def _moments(
    config: Config,
    ops: Sequence[Op],
    stages: Sequence[StageReport],
    cuts: Sequence[StagePlan],
    own: Sequence[StagePlan],
    state: Mapping[int, StateBytes],
) -> Iterator[Moment]:
    """One per computation of a rank's lowered order, and the update. Masters of `own` stages leave
    and come back, sums of gradients are made by the first backward; where it is split those of
    linear layers by its W, as far as `put_off_sums` knows them. With updates in the backward a
    stage's weights and sums go behind its last op."""
    masters = {stage.index: master_bytes(config, stage) for stage in own}
    leave, through = set[Op](), set[Op]()
    for index in masters:
        if (found := master_moments(ops, index)) is not None:
            leave.add(found.left)
            through.add(found.through)
    applied = {op.stage: op for op in ops} if config.optim.apply_in_backward else {}
    held = away = 0
    to_come = {index: part.gradients for index, part in state.items()}
    put_off = {stage.index: put_off_sums(config, stage) for stage in own}
    peaks = _BackwardPeaks(config, own)
    losses = {stage.index: head_bytes(config, stage) for stage in own}
    done: list[StagePlan] = []
    gone = reduction_end(config, done, applied=True)
    for op in ops:
        stage, kind = stages[op.stage], op.kind
        peak = BackwardPeak(head=losses[op.stage].in_op(kind.name))
        if op in leave:
            away += masters[op.stage]
        if kind is Kind.F:
            held += stage.held_bytes
        elif kind in (Kind.B, Kind.I):
            peak = peaks.of(op, is_first=op.stage in to_come)
            if to_come.pop(op.stage, 0) and kind is Kind.I and put_off[op.stage]:
                to_come[op.stage] = put_off[op.stage]
        elif kind is Kind.W:
            to_come.pop(op.stage, None)
        elif kind is Kind.OFFLOADED:
            held -= stage.leaving_bytes
        elif kind is Kind.RELOAD:
            held += stage.leaving_bytes
        coming = sum(to_come.values())
        here = Moment(
            str(op),
            held - peak.freed,
            peak.recompute,
            away,
            coming + peak.sums_to_come,
            peak.workspace,
            peak.head,
            _absent(gone),
        )
        held -= _gone(stage, kind)
        if op in through:
            away -= masters[op.stage]
        if applied.get(op.stage) == op:
            (ending,) = (each for each in own if each.index == op.stage)
            reduction = reduction_peak(config, [ending], applied=True)
            absent = _absent(gone, reduction)
            reduced = Moment(str(op), held, 0, away, coming, reduction.buffer, absent=absent)
            here = max(here, reduced, key=lambda moment: moment.total)
            done.append(ending)
            gone = reduction_end(config, done, applied=True)
            yield here
        elif kind in COMPUTE:
            yield here
    sent = {SENT: sum(sent_bytes(config, cuts, stage) for stage in own)}  # all is gone by then
    if applied:
        yield Moment(UPDATE, 0, 0, absent=_absent(gone) | sent)
    else:
        reduction = reduction_peak(config, own)
        yield Moment(UPDATE, 0, 0, workspaces=reduction.buffer, absent=_absent(reduction) | sent)


def _gone(stage: StageReport, kind: Kind) -> int:
    """What a micro-batch gives up at the end of one of its backward's ops."""
    match kind:
        case Kind.B:
            return stage.held_bytes
        case Kind.I:
            return stage.lighter_bytes
        case Kind.W:
            return stage.held_bytes - stage.lighter_bytes
        case _:
            return 0


class _BackwardPeaks:
    """Peaks of the backwards of a rank's stages, each worked out once."""

    def __init__(self, config: Config, own: Sequence[StagePlan]) -> None:
        self._config = config
        self._own = {stage.index: stage for stage in own}
        self._found: dict[tuple[int, Kind, bool], BackwardPeak] = {}

    def of(self, op: Op, *, is_first: bool) -> BackwardPeak:
        """That of the op, a B or an I. The sums that a first I makes are all counted as there."""
        key = op.stage, op.kind, is_first and op.kind is Kind.B
        if key not in self._found:
            frees, stage = op.kind is Kind.B, self._own[op.stage]
            self._found[key] = backward_peak(self._config, stage, is_first=key[2], frees=frees)
        return self._found[key]


def _absent(*reductions: Reduction) -> dict[str, int]:
    return {
        WEIGHTS: sum(each.weights_gone for each in reductions),
        ACCUMULATORS: sum(each.sums_gone for each in reductions),
    }


def _warm_ups(
    config: Config,
    ledger: RankLedger,
    cuts: Sequence[StagePlan],
    own: Sequence[StagePlan],
    state: Mapping[int, StateBytes],
) -> Iterator[Moment]:
    """A micro-batch of each stage alone, forward and back: before that the rank has masters and
    no moments, channels are not open, and what crosses lies in memory of its own. Reducing its
    gradients takes no more than an update of the whole rank."""
    for stage in own:
        received = boundary_of(config, cuts[stage.index - 1]) if stage.index else 0
        returned = gradient_bytes(config, stage.after) if stage.index + 1 < len(cuts) else 0
        part, first = state[stage.index], backward_peak(config, stage, is_first=True)
        yield Moment(
            WARM_UP,
            received + activation_bytes(config, stage) + returned - first.freed,
            first.recompute,
            head=first.head,
            sums_to_come=first.sums_to_come,
            workspaces=first.workspace,
            absent={
                WEIGHTS: ledger.weights
                - _whole_weights(config, own)
                - (part.weights - part.copies)
                + _whole_weights(config, [stage]),
                COPIES: ledger.copies - part.copies,
                ACCUMULATORS: ledger.accumulators - part.gradients,
                OPTIMIZER: ledger.optimizer,
                SLOTS: ledger.slots - arena_bytes(config),
                SENT: ledger.sent,
            },
        )


def _whole_weights(config: Config, stages: Sequence[StagePlan]) -> int:
    """Weights that are not gathered for a step, but there at all times."""
    return sum(
        held.weights
        for stage in stages
        for unit in stage.units
        for held in holdings(config, stage, unit)
        if not held.is_sharded
    )


def ledger_text(config: Config) -> str:
    """The predicted rows of every rank at its peak, for people."""
    ledgers = predict(config)
    headings = ("rank", *(name for name, _ in ledgers[0].rows()), "peak", "in")
    rows = [
        (
            str(ledger.rank),
            *(short_bytes(num_bytes) for _, num_bytes in ledger.rows()),
            short_bytes(ledger.peak_bytes),
            ledger.peak.op,
        )
        for ledger in ledgers
    ]
    return "\n".join(text_table(headings, rows, left="in"))


def check_text(config: Config, measured: Sequence[MeasuredMemory]) -> str:
    """Predicted against measured, a line per rank and row. `measured`: of one step of a run."""
    headings = ("rank", "row", "predicted", "measured", "off by")
    lines = []
    for ledger, found in zip(predict(config), measured, strict=True):
        slack = None
        if found.peak_bytes is not None and found.reserved_bytes is not None:
            slack = found.reserved_bytes - found.peak_bytes
        for name, ours, theirs in (
            ("parameters between steps", ledger.resting_parameters, found.resting_parameters),
            ("optimizer", ledger.optimizer, found.optimizer),
            ("peak of live tensors", ledger.peak_bytes, found.peak_bytes),
            ("allocator slack", None, slack),
        ):
            lines.append((str(ledger.rank), name, _cell(ours), _cell(theirs), _off(ours, theirs)))
    text = "\n".join(text_table(headings, lines, left="row"))
    if any(found.peak_bytes is None for found in measured):
        text += "\n- is not measured: this device has no counter of live tensors"
    return text


def _cell(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else short_bytes(num_bytes)


def _off(predicted: int | None, measured: int | None) -> str:
    if predicted is None or not measured:
        return "-"
    return f"{predicted / measured - 1:+.2%}"
