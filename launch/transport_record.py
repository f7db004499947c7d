"""What the bench of the transports measures: a row a quantity, and how rows stand to the bars."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SIZES_BYTES = (262_144, 2_097_152, 16_777_216, 83_886_080, 335_544_320)
RAW = "raw peer copy"


@dataclass(slots=True)
class Row:
    """One measured quantity: every repetition, in `unit`. `against` is the name of its baseline."""

    metric: str
    kind: str
    num_bytes: int
    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def record(self) -> dict[str, object]:
        return {
            **asdict(self),
            "median": self.median,
            "lowest": min(self.values),
            "highest": max(self.values),
        }

    def __str__(self) -> str:
        spread = (max(self.values) - min(self.values)) / abs(self.median or 1) * 100
        return (
            f"{self.metric:28} {self.kind:14} {self.num_bytes / 1e6:8.2f} MB"
            f" {self.median:9.2f} {self.unit:5} +-{spread / 2:5.1f} %  n={len(self.values)}"
        )


def library_versions(library: str | None) -> dict[str, str]:
    """Versions of all that moves data on this machine; `library` is put's libnccl, if given."""
    import torch
    from torch._C._distributed_c10d import ProcessGroupNCCL

    from ppruntime.transports import nccl_library
    from ppruntime.transports.base import TransportError
    from ppruntime.transports.nccl_api import version_text

    runtime = ProcessGroupNCCL.get_runtime_nccl_version()  # type: ignore[call-arg]
    try:
        put = version_text(nccl_library.load(nccl_library.FOR_PUT, library).version)
    except TransportError as error:
        put = str(error)
    driver = Path("/sys/module/nvidia/version")
    return {
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": driver.read_text().strip() if driver.is_file() else "unknown",
        "nccl of torch": ".".join(map(str, runtime)),
        "nccl of put": put,
        "python": sys.version.split()[0],
    }


def bars(by_rank: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """What the project asks for: ratios within the run, the worse rank counts."""
    largest = SIZES_BYTES[-1]

    def medians(metric: str, kind: str) -> list[float]:
        return [
            row["median"]
            for rows in by_rank
            for row in rows
            if (row["metric"], row["kind"], row["num_bytes"]) == (metric, kind, largest)
        ]

    bars: dict[str, float] = {}
    for kind in ("copy_engine", "put"):
        raw, rate = medians("both ways", RAW), medians("both ways", kind)
        if raw and rate:
            bars[f"{kind} both ways at 335 MB, of raw peer copy (bar 0.95)"] = min(rate) / max(raw)
        for what in ("bf16 matmul", "FP8 grouped GEMM"):
            for way in ("one way", "both ways"):
                ours, nccl = (medians(f"{what}, {way}", k) for k in (kind, "nccl"))
                if ours and nccl and max(nccl) > 0:
                    name = f"{kind} slow-down of {what}, {way}, of nccl's (bar 0.4)"
                    bars[name] = max(ours) / max(nccl)
    return bars
