"""Writes docs/measurements.md from the JSON files in docs/bench/: `python
docs/make_measurements.py`.

Every figure there comes from one of these files, which names its command, device, versions and
date.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
BENCH = DOCS / "bench"
LARGE = 335_544_320
"""Bytes of V4.1-Flash's streams at 8,192 tokens: one boundary."""
NOT_RUN = """## Not run

- Anything between hosts: `put` over InfiniBand, `nccl` over a network.
- More than two GPUs.
- The kernels inside a training run, and expert parallelism.
"""


def main() -> None:
    """Writes the page."""
    parts = [
        "# Measurements\n\nWritten by `python docs/make_measurements.py` from `docs/bench/*.json`."
        " Medians; ratios hold within one run only.\n"
    ]
    for prefix, write in WRITERS.items():
        for path in sorted(BENCH.glob(f"{prefix}*.json")):
            record = json.loads(path.read_text())
            parts.append(f"{write(record)}\n{_origin(path, record)}")
    (DOCS / "measurements.md").write_text("\n".join([*parts, NOT_RUN]))


def transports(record: dict[str, Any]) -> str:
    """Rates, latency, and what a transfer costs the compute beside it."""
    rows = record["rows"]

    def of(metric: str, kind: str, num_bytes: int = LARGE) -> float | None:
        """Median over both ranks' values."""
        values = [
            value
            for row in rows
            if (row["metric"], row["kind"], row["num_bytes"]) == (metric, kind, num_bytes)
            for value in row["values"]
        ]
        return statistics.median(values) if values else None

    kinds = ("raw peer copy", "nccl", "nccl 4 CTAs", "copy_engine", "put")
    both = {kind: of("both ways", kind) for kind in kinds}
    raw = both["raw peer copy"]
    large = _table(
        ("one boundary, 335.5 MB", "one way GB/s", "both ways GB/s", "of a raw copy", "latency us"),
        (
            (
                kind,
                _number(of("one way", kind), 0),
                _number(both[kind], 0),
                _number(both[kind] / raw if raw and both[kind] else None, 3),
                _number(of("latency", kind), 0),
            )
            for kind in kinds
        ),
    )
    beside = ("bf16 matmul", "FP8 grouped GEMM")
    slow = _table(
        (
            "compute beside it slows down by",
            *(f"{b}, {w} ways" for b in beside for w in ("one", "both")),
        ),
        (
            (
                kind,
                *(
                    _number(of(f"{b}, {way}", kind), 1, " %")
                    for b in beside
                    for way in ("one way", "both ways")
                ),
            )
            for kind in kinds[1:]
        ),
    ).replace("one ways", "one way")
    small = _table(
        ("latency by size, us", *kinds[1:]),
        (
            (
                f"{size / 1e6:g} MB",
                *(_number(of("latency", kind, size), 0) for kind in kinds[1:]),
            )
            for size in sorted({row["num_bytes"] for row in rows if row["metric"] == "latency"})
        ),
    )
    return f"## Transports, two GPUs\n\n{large}\n{slow}\n{small}"


def pipeline(record: dict[str, Any]) -> str:
    """Steps of whole pipelines."""
    rows = (
        (
            case["order"],
            case["transport"],
            str(case["num_micro_batches"]),
            _number(case.get("step_seconds_median"), 3),
            _number(case.get("predicted_over_measured"), 4),
            _number(100 * case["bubble_fraction"], 2, " %")
            if "bubble_fraction" in case
            else "refused",
            case.get("gradient_digest", case.get("refused", "")),
        )
        for case in record["cases"]
    )
    head = ("order", "transport", "M", "step s", "predicted / measured", "bubble", "gradients")
    title = f"## Pipeline steps, {record['model']}, {record['seq_len']:,} tokens a micro-batch"
    return f"{title}\n\n{_table(head, rows)}"


def schedules(record: dict[str, Any]) -> str:
    """The rig of sleeping stages; the file says itself what its rows are."""
    tables = [
        f"{table['title']}\n\n{_table(table['head'], table['rows'])}"
        for table in record.get("tables", ())
    ]
    return "## Orders on sleeping stages\n\n" + "\n".join(tables)


def layers(record: dict[str, Any]) -> str:
    """Kernels of the layers."""
    return f"## Layer kernels\n\n{_rows_as_they_are(record)}"


def moe(record: dict[str, Any]) -> str:
    """Experts."""
    return f"## Experts\n\n{_rows_as_they_are(record)}"


def _rows_as_they_are(record: dict[str, Any]) -> str:
    rows: list[dict[str, Any]] = record["rows"]
    head = [key for key, value in rows[0].items() if not isinstance(value, (list, dict))]
    return _table(head, ([_cell(row.get(key)) for key in head] for row in rows))


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _number(value: float | None, decimals: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.{decimals}f}{unit}"


def _origin(path: Path, record: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"[{path.name}](bench/{path.name}): `{record['command']}`, {record['device']}, {versions},"
        f" {record['date'][:10]}.\n"
    )


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "transport": transports,
    "pipeline": pipeline,
    "schedules": schedules,
    "layer": layers,
    "moe": moe,
}


if __name__ == "__main__":
    main()
