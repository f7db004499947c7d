"""The arithmetic of projection: MFU, step time, tokens/s, days, cost, failures. Pure, no torch.

Start at `Job`: what is trained on what. `Job.at_mfu`, `at_step_s`, `at_tokens_per_s` and `at_days`
give the same `Pace` from either end. `pipeline` finds the step time of a pipeline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

DAY_S = 86400.0
HOUR_S = 3600.0
MOST_OF_PEAK = 2.0
"""No GPU runs faster than so many times its dense bf16 peak: FP8's is twice as high."""


class ProjectionError(ValueError):
    """Nothing can be projected from what was given; one sentence with the values and the remedy."""


class Origin(StrEnum):
    """Where a number comes from, the most certain first."""

    MEASURED = "measured"
    """Observed in a run; the source says which."""
    MODELLED = "modelled"
    """Follows from the other numbers by the formula or simulation that the source names."""
    ASSUMED = "assumed"
    """Taken as given: a choice, a data sheet, a guess."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that says where it comes from. A tuple has one value a rank."""

    value: float | tuple[float, ...]
    unit: str
    origin: Origin
    source: str
    low: float | tuple[float, ...] | None = None
    """The lower end of its interval; None: it has none, it is arithmetic on what was given."""
    high: float | tuple[float, ...] | None = None


def with_interval(middle: Number, *others: Number) -> Number:
    """`middle` with the interval that the values of all of them span; as it is where they are the
    same."""
    rows = [
        number.value if isinstance(number.value, tuple) else (number.value,)
        for number in (middle, *others)
    ]
    low, high = (tuple(map(end, zip(*rows, strict=True))) for end in (min, max))
    if all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12) for a, b in zip(low, high, strict=True)):
        return middle
    if isinstance(middle.value, tuple):
        return replace(middle, low=low, high=high)
    return replace(middle, low=low[0], high=high[0])


def weakest(*origins: Origin) -> Origin:
    """The least certain of them: what a sum of such numbers is."""
    return max(origins, key=list(Origin).index)


def training_flops_per_token(active: float, *, frozen: float = 0.0, adapters: float = 0.0) -> float:
    """FLOPs of a token in training by the 6ND rule: 2 forward, 2 for the input's gradient, 2 for
    the weight's.

    `active` are the matmul parameters that a token meets, of which `frozen` get no gradient and
    count 4; `adapters` (LoRA) come on top and count 6. Attention scores and recomputed work do not
    count. Source: Kaplan et al. 2020, section 2.1.
    """
    positive("active parameters", active)
    if not 0 <= frozen <= active:
        raise ProjectionError(
            f"{frozen:g} frozen of {active:g} active parameters is not a share of them; "
            f"give 0 to {active:g}"
        )
    if not 0 <= adapters < math.inf:
        raise ProjectionError(f"{adapters:g} adapter parameters is no count; give 0 or more")
    return 6.0 * (active - frozen) + 4.0 * frozen + 6.0 * adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training to be done, and the cluster that does it."""

    flops_per_token: float
    """By the 6ND rule: `training_flops_per_token`."""
    total_tokens: float
    num_gpus: int
    gpu_flops: float
    """Peak FLOP/s of one GPU that MFU is a share of."""
    global_batch_tokens: float
    """Tokens per optimizer step, over all GPUs."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            positive(name, getattr(self, name))

    def at_tokens_per_s(self, tokens_per_s: float) -> Pace:
        positive("tokens per second", tokens_per_s)
        return Pace(self, tokens_per_s)

    def at_mfu(self, mfu: float) -> Pace:
        """`mfu` is a share: 0.2894."""
        positive("MFU", mfu)
        return Pace(self, mfu * (self.num_gpus * self.gpu_flops) / self.flops_per_token)

    def at_step_s(self, step_s: float) -> Pace:
        positive("the step's seconds", step_s)
        return Pace(self, self.global_batch_tokens / step_s)

    def at_days(self, days: float) -> Pace:
        positive("days", days)
        return Pace(self, self.total_tokens / (days * DAY_S))


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a job runs. Everything follows from its tokens per second, over all GPUs."""

    job: Job
    tokens_per_s: float

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, a share. Source: Chowdhery et al. 2022 (PaLM), appendix B,
        without its attention term."""
        job = self.job
        return self.tokens_per_s * job.flops_per_token / (job.num_gpus * job.gpu_flops)

    @property
    def step_s(self) -> float:
        return self.job.global_batch_tokens / self.tokens_per_s

    @property
    def days(self) -> float:
        """For all tokens, if nothing ever fails."""
        return self.job.total_tokens / self.tokens_per_s / DAY_S

    @property
    def gpu_hours(self) -> float:
        return self.job.num_gpus * self.days * (DAY_S / HOUR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruptions:
    """Failures that come at random and cost what was done since the last checkpoint.

    A segment is `interval_s` of training and the save after it. A failure anywhere in it, also in a
    save, throws it away whole; `restart_s` later the segment begins anew, and a failure meanwhile
    makes the restart begin anew. Source: Daly 2006, "A higher order estimate of the optimum
    checkpoint interval for restart dumps", the complete cost function.
    """

    mtbf_s: float
    """Mean time between failures of the whole job: 1 / (failures per GPU-hour x GPUs)."""
    checkpoint_s: float
    """Training stands still for so long at each save."""
    restart_s: float
    """From a failure until training goes on."""
    interval_s: float | None = None
    """Training between two saves; None: the best there is."""

    def __post_init__(self) -> None:
        positive("mean time between failures", self.mtbf_s)
        positive("seconds per checkpoint", self.checkpoint_s)
        if not 0 <= self.restart_s < math.inf:
            raise ProjectionError(f"a restart takes {self.restart_s:g} s; give 0 or more")
        if self.interval_s is not None:
            positive("seconds between checkpoints", self.interval_s)

    @property
    def best_interval_s(self) -> float:
        """The interval with the most useful time: y = interval / MTBF solves
        1 - y = exp(-(y + checkpoint / MTBF)). Near sqrt(2 checkpoint MTBF) where failures are rare
        (Young 1974)."""
        save = self.checkpoint_s / self.mtbf_s
        low, high = 0.0, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            if -math.expm1(-(middle + save)) > middle:
                low = middle
            else:
                high = middle
        return low * self.mtbf_s

    @property
    def useful_share(self) -> float:
        """Of all time, the share that brings training forward, 0 to 1."""
        interval = self.best_interval_s if self.interval_s is None else self.interval_s
        segment = (interval + self.checkpoint_s) / self.mtbf_s
        if segment + self.restart_s / self.mtbf_s > 500:  # e**500: never within any lifetime
            raise ProjectionError(
                f"with a failure every {self.mtbf_s:.4g} s, {interval:.4g} s of training, a save "
                f"of {self.checkpoint_s:.4g} s and a restart of {self.restart_s:.4g} s never "
                "succeed; save more often or restart faster"
            )
        whole = self.mtbf_s * math.exp(self.restart_s / self.mtbf_s) * math.expm1(segment)
        return interval / whole


def mtbf_s(failures_per_gpu_hour: float, num_gpus: int) -> float:
    """Mean time between failures of a job in which any GPU's failure stops all."""
    positive("failures per GPU-hour", failures_per_gpu_hour)
    return HOUR_S / (failures_per_gpu_hour * num_gpus)


def positive(what: str, value: float) -> None:
    """Raises ProjectionError unless `value` is above 0 and finite."""
    if not 0 < value < math.inf:
        raise ProjectionError(f"{what} is {value:g}; give a number above 0")
