"""The ledger against what GPUs had: peaks of live tensors that `bench memory` recorded.

The runs are planned anew, so that a change of the ledger is held to what was measured before it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppruntime.config import load
from ppruntime.ledger import predict

ROOT = Path(__file__).parents[2]
RUN = ROOT / "launch" / "configs" / "v41-proxy-8.toml"
MOST_OFF = 0.03
RECORDS = ("memory", "memory-2-gpus", "memory-one-in-two")
ROWS = [
    pytest.param(row, id=f"{name}: {row['name']}")
    for name in RECORDS
    for row in json.loads((ROOT / "docs" / "bench" / f"{name}.json").read_text())["rows"]
    if row["ranks"]
]


def test_records_hold_runs_on_one_and_two_gpus_of_three_lengths():
    rows = [param.values[0] for param in ROWS]
    assert {row["layout"] for row in rows} == {"one", "pp2", "dp2"}
    assert {row["seq_len"] for row in rows} == {8192, 16384, 24576}


@pytest.mark.parametrize("row", ROWS)
def test_peaks_that_gpus_had_are_planned_within_three_percent(row):
    ledgers = predict(load([str(RUN)], row["overrides"]))
    for found in row["ranks"]:
        planned = ledgers[found["pp_rank"]]
        off = planned.peak_bytes / found["peak_bytes"] - 1
        assert abs(off) <= MOST_OFF, (
            f"rank {found['rank']}: {planned.peak_bytes:,} planned in {planned.peak.op}, "
            f"{found['peak_bytes']:,} measured in {found['peak_op']}, {off:+.1%}"
        )
