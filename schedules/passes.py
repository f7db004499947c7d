"""Order -> order. Each pass keeps the set of computations and says what it adds or moves.

In the order in which they are meant to be applied: `split_backward`, `merge` and
`split_pairs` rewrite computations; `add_offload` adds moves to the host; `add_transfers` adds sends
and receives; `add_frees` says when a receive buffer may be overwritten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ppruntime.schedules.counts import Edge, Traffic, crosses_ranks, traffic
from ppruntime.schedules.ops import COMPUTE, Kind, Op, Pair, Schedule, ScheduleError, Step, ops_of

_FIRST_BACKWARD = frozenset({Kind.B, Kind.I})


def split_backward(schedule: Schedule) -> Schedule:
    """Each B becomes I and, directly after it, W. The backward half of a pair becomes I, with its W
    after the pair. A gradient that is sent leaves before W: I, SEND_B, W."""
    return _rewrite(schedule, _split)


def defer_weight_grads(schedule: Schedule) -> Schedule:
    """Puts weight gradients off until the gradient for the previous stage is on its way, but not
    past the next op: B [SEND_B] becomes I [SEND_B] W. 1F1B becomes 1F1B-W, which gains W's time to
    hide transfers in (2c <= W) and holds no more activations. W's that are apart already stay.
    """
    return split_backward(schedule)


def merge(schedule: Schedule) -> Schedule:
    """Each I directly followed by its W (or with only its own SEND_B between) becomes B again."""
    return _rewrite(schedule, _merge)


def split_pairs(schedule: Schedule) -> Schedule:
    """Takes each pair apart into forward and backward, one after the other."""
    return _rewrite(schedule, lambda order: [op for step in order for op in ops_of(step)])


def drop_micro_batches(schedule: Schedule, num_micro_batches: int) -> Schedule:
    """The same order without the micro-batches from `num_micro_batches` on. What a pair loses
    leaves its other half alone. An order that could not hang still cannot: only waits went away."""

    def keep(order: tuple[Step, ...]) -> list[Step]:
        kept: list[Step] = []
        for step in order:
            ops = [op for op in ops_of(step) if op.micro_batch < num_micro_batches]
            kept += [step] if len(ops) == len(ops_of(step)) else ops
        return kept

    return replace(_rewrite(schedule, keep), num_micro_batches=num_micro_batches)


def add_offload(schedule: Schedule, *, every: int = 1, overlapped: int | None = None) -> Schedule:
    """Moves the saved activations of every `every`-th micro-batch to the host and back.

    OFFLOAD follows F (and its send). OFFLOADED, where computations wait for the copy and its memory
    is free, stands behind the next backward, and no forward of the warm-up waits; or already behind
    `overlapped` computations: `every` of them pace the forwards of the warm-up so that one copy is
    on its way at a time and none when backwards begin, 0 is for a move that takes no time of its
    own. RELOAD stands before the step that precedes the backward, so that it has that step's time;
    or earlier, up to the nearest backward, as long as no more micro-batches lie on the rank then
    than a step later: a copy is often longer than a forward. Nothing is moved that would be away
    during no computation, or back before the first backward has run, which is when a rank holds
    most: the last ranks' micro-batches stay, and each rank's first one. Gradients for weights that
    come later (W) find what RELOAD brought.
    """
    if every < 1:
        raise ScheduleError(f"add_offload(every={every}); the least is 1, every micro-batch")
    if overlapped is not None and overlapped < 0:
        raise ScheduleError(f"add_offload(overlapped={overlapped}); the least is 0, at once")

    def offload(order: tuple[Step, ...]) -> list[Step]:
        compute = _compute_steps(order)
        after: dict[int, list[Step]] = defaultdict(list)
        left: dict[int, list[Step]] = defaultdict(list)
        back: dict[int, list[Step]] = defaultdict(list)
        for move in _moves([ops_of(order[i]) for i in compute], every, overlapped):
            out, gone, home = (
                replace(move.op, kind=k) for k in (Kind.OFFLOAD, Kind.OFFLOADED, Kind.RELOAD)
            )
            sent = _past_sends(order, compute[move.forward])
            after[sent].append(out)
            if move.gone == move.forward + 1:
                after[sent].append(gone)
            else:
                left[compute[move.gone]].append(gone)
            back[compute[move.home]].append(home)
        # What leaves makes room for what comes back.
        before = {i: left[i] + back[i] for i in left.keys() | back.keys()}
        return _insert(order, before, after)

    return _rewrite(schedule, offload)


@dataclass(frozen=True, slots=True)
class _Move:
    """A micro-batch's way to the host and back, by numbers of computations of its rank."""

    op: Op
    """Its first backward."""
    forward: int
    gone: int
    """Before which it is away."""
    home: int
    """Before which it starts to come back."""


def _moves(steps: Sequence[tuple[Op, ...]], every: int, overlapped: int | None) -> Iterator[_Move]:
    """What moves on a rank whose computations are `steps`, in the order of the backwards."""
    has_backward = [any(op.kind is not Kind.F for op in ops) for ops in steps]
    next_backward, last_backward = _next_true(has_backward), _last_true(has_backward)
    forward_at: dict[tuple[int, int], int] = {}
    moves: list[_Move] = []
    first_backward = next((n for n, flag in enumerate(has_backward) if flag), len(steps))
    held = [0] * (len(steps) + 1)  # by how many micro-batches more at each step; summed up below
    for n, op in ((n, op) for n, ops in enumerate(steps) for op in ops):
        key = (op.stage, op.micro_batch)
        if op.kind is Kind.F:
            forward_at[key] = n
            held[n] += 1
        elif op.kind in _FIRST_BACKWARD and key in forward_at:
            forward = forward_at[key]
            held[n + 1] -= 1
            behind = next_backward[forward]
            if overlapped is not None:
                is_last = forward + 1 == behind
                behind = min(behind if is_last else behind - 1, forward + overlapped)
            if op.micro_batch % every == 0 and behind + 1 < n - 1 and n > first_backward:
                moves.append(_Move(op, forward, behind + 1, n - 1))
                held[behind + 1] -= 1
                held[n - 1] += 1
    held = list(accumulate(held))
    for move in moves:
        home = move.home
        if overlapped != 0:
            earliest = max(last_backward[home + 1], move.gone + 1)
            while home > earliest and held[home - 1] < held[home]:
                home -= 1
                held[home] += 1
        yield replace(move, home=home)


def add_transfers(
    schedule: Schedule,
    *,
    slots: int | Mapping[Edge, int] | None = None,
    recv_lead: int | None = None,
    fuse_pairs: bool = False,
) -> Schedule:
    """Adds the sends and receives of every hop, hops within a rank included: whoever runs the order
    treats all alike.

    SEND_F follows F and SEND_B follows I or B at once. RECV (post the receive) stands as early as
    one of the channel's `slots` is free: behind the last reader of the message `slots` before it,
    or at the very start; in the sender's order on each channel. `slots` is a number for all
    channels or one each, by default `slots_held(schedule)`. `recv_lead` = n keeps receives from
    other ranks back: at most n steps ahead of their reader, at most n pending while a step runs.
    Pairs are taken apart so that each half's message leaves when it is there, unless `fuse_pairs`.
    Raises ScheduleError where a receive would come after its reader for want of a slot.
    """
    _refuse_lowered(schedule)
    if recv_lead is not None and recv_lead < 0:
        raise ScheduleError(
            f"recv_lead is {recv_lead}; the least is 0, receive right at the reader"
        )
    if not fuse_pairs:
        schedule = split_pairs(schedule)
    channels = traffic(schedule)
    if slots is None:
        slots = {edge: channel.slots_held for edge, channel in channels.items()}
    orders = []
    for rank, order in enumerate(schedule.orders):
        incoming = [c for e, c in channels.items() if schedule.stage_to_rank[e.dst_stage] == rank]
        receives = _place_receives(schedule, rank, incoming, slots, recv_lead)
        after = {i: sends for i, step in enumerate(order) if (sends := _sends(schedule, step))}
        orders.append(tuple(_insert(order, receives, after)))
    return replace(schedule, orders=tuple(orders))


def add_frees(schedule: Schedule) -> Schedule:
    """Adds FREE_F and FREE_B after the last reader of each receive buffer (B, or W where the
    backward is split), behind the sends that follow it: a gradient's way out comes first."""
    if not schedule.kinds().isdisjoint((Kind.FREE_F, Kind.FREE_B)):
        raise ScheduleError("the order has its frees already; add_frees takes one without")
    last_stage = schedule.num_stages - 1
    split = {
        (op.stage, op.micro_batch)
        for r in range(schedule.num_ranks)
        for op in schedule.ops(r)
        if op.kind is Kind.W
    }

    def free(order: tuple[Step, ...]) -> list[Step]:
        after: dict[int, list[Step]] = {}
        for i, step in enumerate(order):
            frees: list[Step] = []
            for op in ops_of(step):
                if op.kind is Kind.W or (
                    op.kind is Kind.B and (op.stage, op.micro_batch) not in split
                ):
                    if op.stage > 0:
                        frees.append(Op(op.stage, Kind.FREE_F, op.micro_batch))
                    if op.stage < last_stage:
                        frees.append(Op(op.stage, Kind.FREE_B, op.micro_batch))
            if frees:
                after.setdefault(_past_sends(order, i), []).extend(frees)
        return _insert(order, {}, after)

    return _rewrite(schedule, free)


def _place_receives(
    schedule: Schedule,
    rank: int,
    incoming: Sequence[Traffic],
    slots: int | Mapping[Edge, int],
    recv_lead: int | None,
) -> dict[int, list[Step]]:
    """Step -> the receives to post before it."""
    order = schedule.orders[rank]
    not_before: dict[tuple[Edge, int], int] = {}
    if recv_lead is not None:
        remote = [channel for channel in incoming if crosses_ranks(schedule, channel.edge)]
        not_before = _lead_limits(order, remote, recv_lead)
    placed: dict[int, list[tuple[int, int, int, Op]]] = defaultdict(list)
    for number, channel in enumerate(incoming):
        edge, sent = channel.edge, channel.sent
        num_slots = slots if isinstance(slots, int) else slots[edge]
        gaps, free_from = [], 0
        for k, m in enumerate(sent):
            if k >= num_slots:
                free_from = max(free_from, channel.freed_at[sent[k - num_slots]] + 1)
            gaps.append(max(free_from, not_before.get((edge, m), 0)))
        # Receives of a channel keep the sender's order: none later than one that follows it.
        gaps = _running_least(gaps)
        readers = _running_least([channel.taken_at[m] for m in sent])
        for k, m in enumerate(sent):
            taken = channel.taken_at[m]
            if gaps[k] > taken:
                raise ScheduleError(
                    f"rank {rank}, step {taken}: {order[taken]} needs micro-batch {m} while all"
                    f" {num_slots} slots for {edge} are held; {channel.slots_held} are enough"
                )
            kind = Kind.RECV_F if edge.kind == "F" else Kind.RECV_B
            placed[gaps[k]].append((readers[k], number, k, Op(edge.dst_stage, kind, m)))
    return {
        gap: [op for *_, op in sorted(found, key=lambda receive: receive[:3])]
        for gap, found in placed.items()
    }


def _running_least(numbers: Sequence[int]) -> list[int]:
    """Each number lowered to the least of those that follow it."""
    return list(accumulate(reversed(numbers), min))[::-1]


def _lead_limits(
    order: Sequence[Step], channels: Iterable[Traffic], recv_lead: int
) -> dict[tuple[Edge, int], int]:
    """(edge, micro-batch) -> the first step before which its receive may be posted."""
    compute = _compute_steps(order)
    number = {step: n for n, step in enumerate(compute)}
    by_reader = sorted(
        ((taken, c.edge, m) for c in channels for m, taken in c.taken_at.items()),
        key=lambda entry: entry[0],
    )
    limits = {}
    for q, (taken, edge, m) in enumerate(by_reader):
        # While the reader of message q - n runs, q - n + 1 to q are pending: n of them.
        crowded = by_reader[q - recv_lead][0] if q >= recv_lead else 0
        limits[edge, m] = max(compute[max(0, number[taken] - recv_lead)], crowded)
    return limits


def _compute_steps(order: Sequence[Step]) -> list[int]:
    return [i for i, step in enumerate(order) if ops_of(step)[0].kind in COMPUTE]


def _next_true(flags: Sequence[bool]) -> list[int]:
    """For each place the next one behind it that is true, or how many places there are."""
    found, following = [], len(flags)
    for n in range(len(flags) - 1, -1, -1):
        found.append(following)
        if flags[n]:
            following = n
    return found[::-1]


def _last_true(flags: Sequence[bool]) -> list[int]:
    """For each place the last one before it that is true, or -1."""
    found, last = [], -1
    for n, flag in enumerate(flags):
        found.append(last)
        if flag:
            last = n
    return found


def _sends(schedule: Schedule, step: Step) -> list[Step]:
    sends: list[Step] = []
    for op in ops_of(step):
        if op.kind is Kind.F and op.stage < schedule.num_stages - 1:
            sends.append(Op(op.stage, Kind.SEND_F, op.micro_batch))
        elif op.kind in _FIRST_BACKWARD and op.stage > 0:
            sends.append(Op(op.stage, Kind.SEND_B, op.micro_batch))
    return sends


def _split(order: tuple[Step, ...]) -> list[Step]:
    result: list[Step] = []
    pending: list[Step] = []
    for step in order:
        if not _is_send(step):
            result += pending
            pending = []
        if isinstance(step, Pair):
            backward = step.backward
            if backward.kind is Kind.B:
                step = Pair(step.forward, replace(backward, kind=Kind.I))
                pending = [replace(backward, kind=Kind.W)]
        elif step.kind is Kind.B:
            pending = [replace(step, kind=Kind.W)]
            step = replace(step, kind=Kind.I)
        result.append(step)
    return result + pending


def _merge(order: tuple[Step, ...]) -> list[Step]:
    result: list[Step] = []
    for step in order:
        if isinstance(step, Op) and step.kind is Kind.W:
            at = len(result) - 1
            while at >= 0 and _is_send(result[at]):
                at -= 1
            if at >= 0 and (whole := _with_weights(result[at], step)) is not None:
                result[at] = whole
                continue
        result.append(step)
    return result


def _with_weights(step: Step, weights: Op) -> Step | None:
    """`step` with its I turned into B, if that I is the one that `weights` belongs to."""
    gradient = replace(weights, kind=Kind.I)
    whole = replace(weights, kind=Kind.B)
    if isinstance(step, Pair):
        return Pair(step.forward, whole) if step.backward == gradient else None
    return whole if step == gradient else None


def _is_send(step: Step) -> bool:
    return isinstance(step, Op) and step.kind in (Kind.SEND_F, Kind.SEND_B)


def _past_sends(order: Sequence[Step], i: int) -> int:
    """The last of the sends that directly follow step i; i itself if there is none."""
    while i + 1 < len(order) and _is_send(order[i + 1]):
        i += 1
    return i


def _insert(
    order: tuple[Step, ...], before: Mapping[int, list[Step]], after: Mapping[int, list[Step]]
) -> list[Step]:
    """The order with the steps `before[i]` and `after[i]` around step i."""
    result: list[Step] = []
    for i, step in enumerate(order):
        result += before.get(i, ())
        result.append(step)
        result += after.get(i, ())
    return result + list(before.get(len(order), ()))


def _rewrite(schedule: Schedule, change: Callable[[tuple[Step, ...]], Iterable[Step]]) -> Schedule:
    return replace(schedule, orders=tuple(tuple(change(order)) for order in schedule.orders))


def _refuse_lowered(schedule: Schedule) -> None:
    lowered = schedule.kinds() - COMPUTE - {Kind.OFFLOAD, Kind.OFFLOADED, Kind.RELOAD}
    if lowered:
        raise ScheduleError(
            f"{schedule.name} has {' and '.join(sorted(kind.value for kind in lowered))} already;"
            " add_transfers takes an order without transfers and frees"
        )
