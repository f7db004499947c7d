"""How boundaries move in a case of `bench pipeline`, and whether its pairs overlap. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_OVERLAPPED = ", pairs overlapped"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run an order. `name` is what the record calls it, without the pairs."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    hold_seconds: float = 0.0
    """Every message starts so much later."""
    pairs: Pairs | None = None
    """None: as the config says."""

    @property
    def full_name(self) -> str:
        """With what is said of pairs."""
        return self.name if self.pairs is None else f"{self.name}{self.pairs}"

    def standing_still(self) -> Variant:
        """The same without bytes."""
        return replace(self, name="none", hold_seconds=0.0)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs whose halves run at once."""

    sms: tuple[int, int] | None = None
    """Multiprocessors for the products of forward and backward; None: all for either."""

    def __str__(self) -> str:
        return _OVERLAPPED + (f" {self.sms[0]}/{self.sms[1]}" if self.sms else "")

    @property
    def keys(self) -> list[str]:
        """What a config says for it."""
        shares = [f"pp.pair_gemm_sms=[{self.sms[0]}, {self.sms[1]}]"] if self.sms else []
        return ["pp.overlap_pairs=true", *shares]


def without_pairs(name: str) -> tuple[str, str]:
    """A case's full name -> how its boundaries move, and what is said of its pairs."""
    plain, comma, rest = name.partition(_OVERLAPPED)
    return plain, comma + rest


def parsed_kind(kind: str) -> Variant:
    """KIND[/BLOCKS][@LEAD][+pairs[:FORWARD:BACKWARD]] -> the variant. Raises SystemExit for
    anything else."""
    found = re.fullmatch(r"(\w+)(?:/(\d+))?(?:@(\d+))?(\+pairs(?::(\d+):(\d+))?)?", kind)
    if found is None:
        raise SystemExit(
            f"--transports {kind}: write KIND, KIND/BLOCKS, KIND@LEAD or both, with +pairs or"
            " +pairs:FORWARD:BACKWARD behind it for pairs that overlap"
        )
    name, ctas, lead, paired, forward, backward = found.groups()
    said, options = name, {}
    if ctas is not None:
        said, options["transport_ctas"] = f"{said} {ctas} CTAs", int(ctas)
    if lead is not None:
        said, options["recv_lead"] = f"{said} lead {lead}", int(lead)
    pairs = None
    if paired:
        pairs = Pairs((int(forward), int(backward)) if forward else None)
    return Variant(said, name, options, pairs=pairs)
