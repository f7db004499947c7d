"""Writes docs/validation.md from docs/bench/validation*.json: `python docs/make_validation.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
HEAD = """# Validation: predictions against runs

Written by `python docs/make_validation.py` from what `ppruntime validate` recorded, misses
included. Each prediction stands, with the time at which it was written, in the `.jsonl` beside the
record; it was written before its run began. error = predicted / measured - 1.

- v0: timeline and event simulator against an independent longest path (every order, unequal stages)
  and closed forms, 1e-9.
- v1: real processes with sleeping stages on one host; steps of several orders predicted from the op
  times and hop that a shorter step of another order gave; 3 %.
- v2: each half of a pipeline emulated, the other half replayed; from both, the whole pipeline's
  step; 5 %. The first half's cycle x (M + P - 1) is for the record: it does not know the order.
- v3: a real pipeline that trains against a simulation calibrated at another number of
  micro-batches, warm-up and transport.
"""
NOT_RUN = """## Not run

- v4 (emulated PP4 on two GPUs against four), v5 (eight GPUs), v6 (sixteen nodes).
"""


def main() -> None:
    """Writes the page."""
    parts = [HEAD]
    for path in sorted((DOCS / "bench").glob("validation*.json")):
        parts += [_record(path, json.loads(path.read_text()))]
    (DOCS / "validation.md").write_text("\n".join([*parts, NOT_RUN]))


def _record(path: Path, record: dict[str, Any]) -> str:
    cases = record["cases"]
    exact = [case for case in cases if case["rung"] == "v0"]
    lines = [f"## {record['device']}, {record['date'][:10]}", ""]
    if exact:
        worst = max(abs(case["error"]) for case in exact)
        met = sum(case["met"] for case in exact)
        lines += [f"v0: {met} of {len(exact)} cases met, worst error {worst:.1e}.", ""]
    lines += [
        "| rung | case | what | predicted | measured | error | bar | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        if case["rung"] == "v0":
            continue
        bar = "-" if case["limit"] is None else f"{100 * case['limit']:g} %"
        state = "-" if case["limit"] is None else "met" if case["met"] else "MISSED"
        lines.append(
            f"| {case['rung']} | {case['case']} | {case['what']} | {case['predicted']:.4g} | "
            f"{case['measured']:.4g} | {100 * case['error']:+.2f} % | {bar} | {state} |"
        )
    busy = ""
    if load := record.get("load_average"):
        busy = f"load average {load['before'][0]:.1f} before and {load['after'][0]:.1f} after, "
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines += [
        "",
        f"[{path.name}](bench/{path.name}): `{record['command']}`, {versions}, {busy}"
        f"{record['seconds']:.0f} s. Predictions: "
        f"[{record['predictions']}](bench/{record['predictions']}).",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
