"""Finds in a profiler's trace where the host waited for the device while a step's ops ran."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WAITING_CALLS = frozenset(
    {
        "cudaDeviceSynchronize",
        "cudaEventSynchronize",
        "cudaFree",
        "cudaMemcpy",
        "cudaStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "cuMemcpy",
        "cuStreamSynchronize",
    }
)
_HOST_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True, slots=True)
class Wait:
    """One call: `op` is the label around it, `within` torch's innermost operator around it."""

    call: str
    op: str
    within: str


def labels(trace: Mapping[str, Any], texts: Collection[str]) -> list[str]:
    """The labelled ranges among `texts`, in the order in which the host entered them."""
    return [e["name"] for e in _ranges(trace, texts)]


def waits(trace: Mapping[str, Any], texts: Collection[str]) -> list[Wait]:
    """The calls between the first and the last op (labels `texts`) that hold the host until the
    device is done, on any thread: `WAITING_CALLS`, and copies to host memory that is not pinned.

    `trace` is a Chrome trace of torch's profiler.
    """
    ops = _ranges(trace, texts)
    if not ops:
        return []
    first, last = ops[0]["ts"], max(_end(e) for e in ops)
    to_pageable = {
        e.get("args", {}).get("correlation")
        for e in trace["traceEvents"]
        if e.get("cat") == "gpu_memcpy" and "DtoH" in e["name"] and "Pageable" in e["name"]
    } - {None}
    found = []
    for e in trace["traceEvents"]:
        if e.get("cat") not in _HOST_CALLS or not first <= e["ts"] <= last:
            continue
        is_copy = e.get("args", {}).get("correlation") in to_pageable
        if e["name"] in WAITING_CALLS or is_copy:
            call = f"{e['name']} to pageable memory" if is_copy else e["name"]
            found.append(Wait(call, _around(ops, e), _around(_operators(trace, e), e)))
    return found


def _ranges(trace: Mapping[str, Any], texts: Collection[str]) -> list[dict[str, Any]]:
    wanted = set(texts)
    ranges = (
        e for e in trace["traceEvents"] if e.get("cat") == "user_annotation" and e["name"] in wanted
    )
    return sorted(ranges, key=lambda e: e["ts"])


def _operators(trace: Mapping[str, Any], call: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        e
        for e in trace["traceEvents"]
        if e.get("cat") == "cpu_op" and e.get("tid") == call.get("tid")
    ]


def _around(ranges: Sequence[Mapping[str, Any]], call: Mapping[str, Any]) -> str:
    """The shortest range that holds the call; empty if none does."""
    around = [e for e in ranges if e["ts"] <= call["ts"] <= _end(e)]
    return str(min(around, key=lambda e: e["dur"])["name"]) if around else ""


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])
