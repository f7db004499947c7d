"""What `ppruntime project` prints: every number with unit, origin and source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ppruntime.projection.projector import Number
from ppruntime.text_table import short, short_bytes, text_table

_FLAT = ("days", "step_s", "mfu", "gpus", "global_batch_tokens")
_LARGE = ("tokens", "tokens/s", "FLOP", "FLOP/s", "parameters")
_WHOLE = ("GPUs", "GPU-hours", "steps")


def json_text(numbers: Mapping[str, Number], facts: Sequence[str] = ()) -> str:
    """One object: the five that are asked for most as plain numbers, and all under "numbers", those
    with an interval with "low" and "high"; `facts` under "conditions" if there are any."""
    table: dict[str, dict[str, object]] = {}
    for name, number in numbers.items():
        table[name] = {
            "value": number.value,
            "unit": number.unit,
            "origin": str(number.origin),
            "source": number.source,
        }
        if number.low is not None:
            table[name] |= {"low": number.low, "high": number.high}
    found: dict[str, object] = {name: numbers[name].value for name in _FLAT}
    if facts:
        found["conditions"] = list(facts)
    return json.dumps(found | {"numbers": table}, indent=2)


def text(numbers: Mapping[str, Number], facts: Sequence[str] = ()) -> str:
    """A sentence with GPUs and batch, the measured share, `facts`, a line a number, and a table
    each for ranks, stages, hops."""
    days, step, mfu, gpus, batch = (_value(numbers[name]) for name in _FLAT)
    lines = [
        f"{days} days for {_value(numbers['total_tokens'])} tokens on {gpus} GPUs at {mfu} % MFU: "
        f"steps of {step} s with {batch} tokens each"
    ]
    lines.append(
        f"of the step, {_value(numbers['measured_share'])} % is measured, "
        f"{_value(numbers['modelled_share'])} % modelled, "
        f"{_value(numbers['assumed_share'])} % assumed"
    )
    if numbers["days"].low is not None:
        lines.append(
            f"interval: {_range(numbers['days'])} days, {_range(numbers['mfu'])} % MFU, steps of "
            f"{_range(numbers['step_s'])} s"
        )
    lines += facts
    single = {
        name: number
        for name, number in numbers.items()
        if not isinstance(number.value, tuple) and not name.startswith(("stage", "hop"))
    }
    lines += ["", *_lines(single)]
    per_rank = {n: number for n, number in numbers.items() if isinstance(number.value, tuple)}
    if per_rank:
        lines += ["", *_rank_table(per_rank)]
    for group in ("stage", "hop"):
        members = {n: number for n, number in numbers.items() if n.startswith(group)}
        if members:
            lines += ["", *_member_table(group, members)]
    return "\n".join(lines)


def _lines(numbers: Mapping[str, Number]) -> list[str]:
    cells = [
        (name, _value(number), _unit(number), _range(number), str(number.origin), number.source)
        for name, number in numbers.items()
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    return [
        f"{name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  "
        + (f"{interval:<{widths[3]}}  " if widths[3] else "")
        + f"{origin:<{widths[4]}}  {source}"
        for name, value, unit, interval, origin, source in cells
    ]


def _rank_table(numbers: Mapping[str, Number]) -> list[str]:
    """A row a rank; below it where the columns come from."""
    columns = []
    for number in numbers.values():
        assert isinstance(number.value, tuple), "a column has a value a rank"
        columns.append([_on_a_rank(v, number.unit) for v in number.value])
    rows = [(str(rank), *cells) for rank, cells in enumerate(zip(*columns, strict=True))]
    origins = sorted({f"{number.origin}: {number.source}" for number in numbers.values()})
    return [*text_table(("rank", *numbers), rows), *origins]


def _member_table(group: str, numbers: Mapping[str, Number]) -> list[str]:
    """A row a stage or a hop, which all have the same numbers."""
    members: dict[str, list[Number]] = {}
    for name, number in numbers.items():
        members.setdefault(name.partition(".")[0].removeprefix(group), []).append(number)
    names = list(dict.fromkeys(name.partition(".")[2] for name in numbers))
    rows = [
        (index, *map(_value, found), f"{found[0].origin}: {found[0].source}")
        for index, found in members.items()
    ]
    return text_table((group, *names, "origin and source"), rows, left="origin and source")


def _unit(number: Number) -> str:
    """What stands behind the value; bytes have theirs there already."""
    return "" if number.unit == "bytes" else number.unit


def _on_a_rank(value: float, unit: str) -> str:
    if unit == "bytes":
        return short_bytes(value)
    return _four_digits(value) if unit == "s" else f"{value:g}"


def _range(number: Number) -> str:
    """Its interval; empty without one."""
    if number.low is None or number.high is None:
        return ""
    low, high = (_value(replace(number, value=end)) for end in (number.low, number.high))
    return f"{low} to {high}"


def _value(number: Number) -> str:
    value = number.value
    assert not isinstance(value, tuple), "one number was expected, not one a rank"
    if number.unit == "bytes":
        return short_bytes(value)
    if number.unit in _WHOLE:
        return f"{value:,.0f}"
    if number.unit == "%":
        return f"{value:.2f}"
    if number.unit == "days":
        return f"{value:,.1f}"
    if number.unit in _LARGE:
        return short(value)
    return f"{value:,.2f}" if number.unit == "money" else _four_digits(value)


def _four_digits(value: float) -> str:
    return f"{value:#.4g}".rstrip(".") if value else "0"
