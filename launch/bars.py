"""What a bench asks of its figures. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bar:
    """One thing that is asked: `value` may be at most `most`, or is to be at least `least`; the
    other one is None."""

    what: str
    value: float
    most: float | None
    is_met: bool
    least: float | None = None

    @classmethod
    def of(cls, what: str, value: float, most: float) -> Bar:
        """At most `most`; a value that is not a number misses it."""
        return cls(what, value, most, value <= most)

    @classmethod
    def at_least(cls, what: str, value: float, least: float) -> Bar:
        """At least `least`; a value that is not a number misses it."""
        return cls(what, value, None, value >= least, least)

    def __str__(self) -> str:
        verdict = "met" if self.is_met else "MISSED"
        asked = f"at least {self.least:.4g}" if self.most is None else f"at most {self.most:.4g}"
        return f"{verdict:>6}: {self.what}: {self.value:.4f}, {asked}"
