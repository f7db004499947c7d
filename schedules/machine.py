"""What an order runs on, for `simulator`: costs, links, interference, noise, copies, step's end.

All defaults are those of an ideal machine: nothing interferes, nothing varies. Times are in the
costs' unit, called seconds here; bytes per second go with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppruntime.schedules.costs import Costs, StageBytes
from ppruntime.schedules.ops import ScheduleError


@dataclass(frozen=True, slots=True)
class Link:
    """A class of link between two ranks: nvlink, ib, ..."""

    name: str = "ideal"
    latency: float = 0.0
    """Seconds from a message's last byte leaving to its being there."""
    bandwidth: float = float("inf")
    """Bytes per second one way. A rank's messages over one class leave one after another."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < float("inf") or not self.bandwidth > 0:
            raise ScheduleError(
                f"link {self.name}: latency {self.latency} s, bandwidth {self.bandwidth} B/s; a "
                "latency is 0 or more, a bandwidth above 0"
            )


@dataclass(frozen=True, slots=True)
class Interference:
    """What ops suffer on a rank while its messages move.

    Proportional: an op takes `one_way` (a share) longer while messages go in or out, `both_ways`
    while they do both. Blocking: the share `blocking` of an op's work is kernels that stand still
    meanwhile; for an op of many kernels that is the mean over where the message falls.
    """

    one_way: float = 0.0
    both_ways: float = 0.0
    blocking: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.one_way, self.both_ways)
        if not all(0 <= share < float("inf") for share in shares) or not 0 <= self.blocking <= 1:
            raise ScheduleError(
                f"interference {self.one_way}, {self.both_ways}, blocking {self.blocking}; the "
                "first two are shares from 0 up, the third lies in 0 to 1"
            )

    def rate(self, goes_out: bool, comes_in: bool) -> float:
        """Work per second of an op meanwhile; 1 is undisturbed."""
        if not (goes_out or comes_in):
            return 1.0
        share = self.both_ways if goes_out and comes_in else self.one_way
        return (1.0 - self.blocking) / (1.0 + share)


@dataclass(frozen=True, slots=True)
class Noise:
    """What varies from op to op and from rank to rank, drawn from `seed`."""

    jitter: float = 0.0
    """Relative standard deviation of op times, a draw per op."""
    rank_spread: float = 0.0
    """Relative standard deviation of ranks' speeds, a draw per rank and step: stragglers."""
    group: int = 1
    """Ranks that work in lockstep at each place (an expert group): the slowest of so many
    counts."""
    stall_probability: float = 0.0
    """Of an op, to be held up once by `stall` seconds."""
    stall: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        shares = (self.jitter, self.rank_spread, self.stall)
        if (
            not all(0 <= share < float("inf") for share in shares)
            or not 0 <= self.stall_probability <= 1
            or self.group < 1
        ):
            raise ScheduleError(
                f"noise: jitter {self.jitter}, rank spread {self.rank_spread}, stall {self.stall}, "
                f"probability {self.stall_probability}, group {self.group}; give shares and times "
                "of 0 or more, a probability of at most 1, a group of 1 or more"
            )

    @property
    def is_none(self) -> bool:
        return not (self.jitter or self.rank_spread or self.stall_probability)


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The engines that move activations to the host and back; each does one copy at a time."""

    to_host: float
    """Bytes per second."""
    from_host: float

    def __post_init__(self) -> None:
        if not (self.to_host > 0 and self.from_host > 0):
            raise ScheduleError(
                f"host copies at {self.to_host} and {self.from_host} B/s; give numbers above 0"
            )


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What a step does beside its pipeline.

    A rank reduces its gradients over the data ranks as soon as its last op is done, while others
    still work; then all wait for the slowest, do `together` (norm, optimizer) and gather weights.
    """

    reduce: tuple[float, ...] = ()
    """Seconds per rank; empty: none."""
    together: float = 0.0
    gather: tuple[float, ...] = ()
    """Seconds per rank; the slowest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All that `simulate` needs beside the order. `links`, `forward_bytes` and `backward_bytes`
    have one entry per stage hop; hops inside a rank take none of them."""

    costs: Costs
    links: Sequence[Link]
    forward_bytes: Sequence[float]
    backward_bytes: Sequence[float]
    interference: Interference = Interference()
    noise: Noise = Noise()
    host: HostCopies | None = None
    """Needed where the order offloads."""
    stage_bytes: StageBytes | None = None
    """Needed for memory over time and where the order offloads."""
    end: StepEnd = StepEnd()

    def __post_init__(self) -> None:
        hops = self.costs.num_stages - 1
        for name in ("links", "forward_bytes", "backward_bytes"):
            if len(getattr(self, name)) != hops:
                raise ScheduleError(
                    f"{len(getattr(self, name))} {name} for {hops} stage hops; give one per hop"
                )

    @classmethod
    def ideal(cls, costs: Costs, latency: float = 0.0) -> Machine:
        """Costs, and one latency on every hop."""
        hops = costs.num_stages - 1
        return cls(
            costs=costs,
            links=(Link(latency=latency),) * hops,
            forward_bytes=(0.0,) * hops,
            backward_bytes=(0.0,) * hops,
        )
