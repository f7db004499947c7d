"""Writes docs/measurements.md from the JSON files in docs/bench/: `python
docs/make_measurements.py`.

Every figure there comes from one of these files, which names its command, device, versions and
date. What was not run, and what a record lacks, is prose: docs/bench/not-run.md, its last section.
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
NAMED_SHARE = 0.02
"""Kernels with a larger share of a half are named."""


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
    parts.append((BENCH / "not-run.md").read_text())
    (DOCS / "measurements.md").write_text("\n".join(parts))


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
    lines = []
    for text, value in record["bars"].items():
        what, _, bar = text.removesuffix(")").partition(" (bar ")
        is_met = value >= float(bar) if "raw peer copy" in what else value <= float(bar)
        limit = "at least" if "raw peer copy" in what else "at most"
        lines.append(f"- {'met' if is_met else 'MISSED'}: {what}: {value:.3f}, {limit} {bar}\n")
    note = "Tables: medians over both ranks. Bars: the worse rank.\n"
    return f"## Transports, two GPUs\n\n{note}\n{large}\n{slow}\n{small}\n{''.join(lines)}"


def pipeline(record: dict[str, Any]) -> str:
    """Steps of whole pipelines: the real transports, the case that moves nothing, torch's."""

    def cell(
        case: dict[str, Any], key: str, decimals: int, unit: str = "", scale: float = 1
    ) -> str:
        return _number(case[key] * scale, decimals, unit) if key in case else "-"

    tells_peaks = any(case.get("peak_bytes") for case in record["cases"])

    def peaks(case: dict[str, Any]) -> tuple[str, ...]:
        found = [_number(peak / 1e9, 2) for peak in case.get("peak_bytes", ())]
        return (" / ".join(found) or "-",) if tells_peaks else ()

    def order(case: dict[str, Any]) -> str:
        fused = case.get("fused_wgrads")
        return case["order"] if fused is None else f"{case['order']}, n = {fused}"

    rows = (
        (
            order(case),
            case["transport"],
            str(case["num_micro_batches"]),
            cell(case, "step_seconds_median", 1, scale=1000)
            if "refused" not in case
            else f"refused: {case['refused']}",
            cell(case, "cycle_seconds", 2, scale=1000),
            *peaks(case),
            " / ".join(_number(ms, 2) for ms in case.get("hop_ms", ())) or "-",
            cell(case, "span_over_timeline", 4),
            cell(case, "bubble_fraction", 2, " %", 100),
            cell(case, "host_seconds", 1, scale=1000),
            case.get("gradient_digest") or "-",
        )
        for case in record["cases"]
    )
    head = (
        "order",
        "transport",
        "M",
        "step ms",
        "cycle ms",
        *(("peak GB, rank by rank",) if tells_peaks else ()),
        "hop ms, there / back",
        "step / timeline",
        "bubble",
        "host ms",
        "gradients",
    )
    note = (
        "`none` moves nothing: a cycle beyond its is lost to transfers. The timeline is fed with"
        " the run's own mean op times and hops. CUDA lets a host run some hundred milliseconds"
        " ahead, so its time is near the step's in any case; where it holds the GPU up, the bubble"
        " is larger than the order's own."
    )
    if any(case.get("fused_wgrads") for case in record["cases"]):
        note += " n: micro-batches whose weight gradients FP8 experts add in one launch."
    bars = "".join(
        f"- {'met' if bar['is_met'] else 'MISSED'}: {bar['what']}: {bar['value']:.4g}, at most"
        f" {bar['most']:.4g}\n"
        for bar in record["bars"]
    )
    more = "".join(f"- {text}\n" for text in record["notes"])
    title = f"## Pipeline steps, {record['model']}, {record['seq_len']:,} tokens a micro-batch"
    return f"{title}\n\n{note}\n\n{_table(head, rows)}\n{bars}{more}"


def schedules(record: dict[str, Any]) -> str:
    """The rig of sleeping stages: the real executor against the timeline and against torch."""
    columns = ((0.0, False), (5.0, False), (15.0, False), (30.0, False), (15.0, True))
    errors: dict[str, dict[tuple[float, bool], float]] = {}
    for row in record["rig"]:
        case = row["case"]
        errors.setdefault(case["order"], {})[case["latency_ms"], case["unequal"]] = row["error"]
    rig = _table(
        (
            "step over timeline, injected latency",
            "0 ms",
            "5 ms",
            "15 ms",
            "30 ms",
            "15 ms, unequal",
        ),
        (
            (order, *(_number(100 * of[c], 2, " %") for c in columns))
            for order, of in errors.items()
        ),
    )
    torch = _table(
        ("order, latency 0", "ours ms", "torch ms", "ours / torch", "bubble, ours / torch"),
        (
            (
                row["order"],
                _number(statistics.median(row["ours_ms"]), 0),
                _number(statistics.median(row["torch_ms"]), 0),
                _number(row["ratio"], 3),
                _number(row["bubble_ratio"], 3),
            )
            for row in record["torch"]
        ),
    )
    bars = "".join(
        f"- {'met' if bar['met'] else 'MISSED'}: {bar['what']} {bar['worst']:.4g}, at most"
        f" {bar['limit']:g}\n"
        for bar in record["bars"]
    )
    note = (
        "4 ranks over shared memory, 16 micro-batches, F 20 ms, B 40 ms a chunk. What the timeline"
        " does not know is the hop's own time, in the column hop at latency 0."
    )
    return f"## Orders on sleeping stages\n\n{note}\n\n{rig}\n{torch}\n{bars}"


def layers(record: dict[str, Any]) -> str:
    """Kernels of the layers."""
    if "lines" in record:
        return _halves(record)
    if "head_tokens" in record:
        return _parts(record)
    if "bars" in record:
        return _linears(record)
    return _attention(record)


def _halves(record: dict[str, Any]) -> str:
    """Halves by kind, attention's with its operations, and what the time of one is made of."""
    is_moe = any(line["part"] == "MoE half" for line in record["lines"])
    lines = [line for line in record["lines"] if not line["failure"]]
    phases = ("forward", "input gradient", "weight gradients")
    halves: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line["part"].endswith(" half"):
            halves.setdefault((line["kind"], line["backend"]), {})[line["phase"]] = line
    sums = {key: sum(by[name]["median"] for name in phases) for key, by in halves.items()}

    def half(key: tuple[str, str]) -> list[str]:
        by = halves[key]
        times = [_number(by[name]["median"], 2) for name in phases]
        floors = " / ".join(_number(by[name]["ratio_to_floor"], 2) for name in phases)
        hosts = " / ".join(_number(statistics.median(by[n]["host_ms"]), 1) for n in phases)
        return [*key, *times, _number(sums[key], 2), floors, hosts]

    parts = (
        (
            line["part"],
            line["kind"],
            line["backend"],
            line["phase"],
            _number(line["median"], 2),
            _number(line["ratio_to_floor"], 2),
        )
        for line in lines
        if not line["part"].endswith(" half")
    )
    note = (
        "Halves hold the residual's mHC. The floor is products at"
        f" {record['teraflops']:.0f} TFLOP/s and bytes at {record['gigabytes_per_s']:,.0f} GB/s, of"
        " each phase. "
    )
    note += (
        "An eighth of the experts is here and gets the rows of one of eight ranks; nothing is sent."
        if is_moe
        else "`library`: FlashMLA and cuDNN's frontend. `fp8`: the dense linears."
    )
    title = f"{'MoE' if is_moe else 'Attention'} halves, {record['model']}"
    text = f"## {title}, {record['tokens']:,} tokens\n\n{note}\n\n"
    head = ("kind", "kernels", "forward ms", "input gradient", "weight gradients", "together",
            "x floor", "host ms")  # fmt: skip
    text += f"{_table(head, map(half, halves))}\n"
    reuse = {backend: total for (kind, backend), total in sums.items() if kind == "Reuse"}
    if reuse:
        best = min(reuse, key=lambda backend: reuse[backend])
        verdict = "met" if reuse[best] <= 14 else "MISSED"
        text += f"- {verdict}: Reuse half by {best}: {reuse[best]:.2f} ms, at most 14\n\n"
        text += _profile(record, "Reuse", best)
    if is_moe:
        best = min((backend for _, backend in sums), key=lambda b: sums["routed", b])
        return f"{text}\n{_profile(record, 'routed', best)}"
    head = ("part", "kind", "kernels", "phase", "ms", "x floor")
    return f"{text}{_table(head, parts)}"


def _profile(record: dict[str, Any], kind: str, backend: str) -> str:
    """The kernels of a half that take more than 2 % of its time."""
    for profile in record.get("profiles", ()):
        if (profile["kind"], profile["backend"]) == (kind, backend):
            rows = [
                (f"`{each['kernel'][:60]}`", _number(each["launches"], 0), _number(each["us"], 0),
                 f"{each['share']:.1%}")
                for each in profile["kernels"]
                if each["share"] > NAMED_SHARE
            ]  # fmt: skip
            named = sum(k["share"] for k in profile["kernels"] if k["share"] > NAMED_SHARE)
            rest = profile["total_us"] * (1 - named)
            rows.append(("others, none above 2 %", "", _number(rest, 0), f"{1 - named:.1%}"))
            title = f"What the {kind} half by {backend} is made of:"
            return f"{title}\n\n{_table(('kernel', 'launches', 'us', 'share'), rows)}\n"
    return ""


def _parts(record: dict[str, Any]) -> str:
    """Head, residuals and Engram."""
    passes = ("forward", "backward", "input_grad", "weight_grad")
    rows = (
        (
            row["part"],
            row["variant"],
            *(_number(statistics.median(row["milliseconds"][name]), 2) for name in passes),
            " / ".join(_number(row["ratio_to_floor"][name], 2) for name in passes[:2]),
            _number(row["peak_bytes"] / 1e9, 2, " GB"),
        )
        for row in record["rows"]
        if not row["failure"]
    )
    head = ("part", "kernels", "forward ms", "backward", "input grad", "weight grad", "x floor",
            "peak")  # fmt: skip
    title = f"## Head, residuals, Engram, {record['tokens']:,} tokens"
    note = (
        f"The head has {record['head_tokens']:,} tokens. The floor is its products, or the bytes of"
        " a pass that nothing splits; forward / backward."
    )
    return f"{title}\n\n{note}\n\n{_table(head, rows)}\n{_parts_bars(record)}"


def _parts_bars(record: dict[str, Any]) -> str:
    """What is asked of the head and of passes that move bytes alone."""
    found = {
        row["part"]: row
        for row in record["rows"]
        if row["variant"] == "triton" and not row["failure"]
    }
    lines = []
    if "head" in found:
        times, peak = found["head"]["milliseconds"], found["head"]["peak_bytes"] / 1e9
        both = sum(statistics.median(times[name]) for name in ("forward", "backward"))
        lines = [_bar("head, forward + backward, ms", both, 94), _bar("head, peak, GB", peak, 6)]
    for part in ("mhc", "gated", "layerscale", "engram gate"):
        for name, ratio in found.get(part, {}).get("ratio_to_floor", {}).items():
            lines.append(_bar(f"{part}, {name}, x the time of its bytes", ratio, 1.3))
    return "".join(lines)


def _bar(what: str, value: float, bar: float, *, at_least: bool = False) -> str:
    verdict = "met" if (value >= bar if at_least else value <= bar) else "MISSED"
    return f"- {verdict}: {what}: {value:.4g}, {'at least' if at_least else 'at most'} {bar:g}\n"


def _linears(record: dict[str, Any]) -> str:
    """Dense linears in bf16 and FP8, casts included."""
    rows = (
        (
            row["layer"],
            row["phase"],
            row["variant"],
            _number(row["median"], 3),
            _number(row["teraflops"], 0) if row["teraflops"] else "-",
            _number(row["ratio_to_bf16"], 2) if row["ratio_to_bf16"] else "-",
        )
        for row in record["rows"]
        if not row["failure"]
    )
    head = ("layer", "phase", "variant", "ms", "TFLOP/s", "x bf16")
    best = {
        f"{row['layer']} {row['phase']}": row["ratio_to_bf16"]
        for row in record["rows"]
        if row["variant"] == "fp8 fastest"
    }
    bars = "".join(
        f"- {'met' if best[what] >= bar else 'MISSED'}: {what}, fastest: {best[what]:.2f} x bf16,"
        f" at least {bar:g}\n"
        for what, bar in record["bars"].items()
    )
    return f"## Dense linears, {record['tokens']:,} tokens\n\n{_table(head, rows)}\n{bars}"


def _attention(record: dict[str, Any]) -> str:
    """Sparse attention: one line a variant, best first."""
    rows = (
        (
            row["part"],
            row["variant"],
            str(row["slots"]),
            _number(row["median"], 2),
            _number(100 * row["spread"], 1, " %"),
            _number(row["teraflops"], 0),
            ", ".join(f"{name} {error:.1e}" for name, error in row["errors"].items()),
            "yes" if all(row["repeats_bitwise"].values()) else "no",
        )
        for row in sorted(
            record["rows"], key=lambda row: (-row["slots"], row["part"], row["median"])
        )
        if not row["failure"]
    )
    head = ("part", "variant", "slots", "ms", "spread", "TFLOP/s", "error", "repeats bitwise")
    title = f"## Sparse attention, {record['tokens']:,} tokens, 64 heads of 512"
    note = (
        "`hopper` is the Gluon kernel, the others Triton tilings; `fixed` adds up the keys'"
        " gradients deterministically. Errors against the fp32 reference. FLOPs: 131,072 per slot"
        " and token forward, 2.5 times that backward. A bf16 8192^3 matmul ran at"
        f" {record['matmul_teraflops']:.0f} TFLOP/s in the same run."
    )
    best: dict[tuple[str, bool], float] = {}
    for row in record["rows"]:
        key = row["part"], row["variant"] == "library"
        if row["slots"] == 640 and not row["failure"]:
            best[key] = max(best.get(key, 0.0), row["teraflops"])
    bars = "".join(
        _bar(
            f"{name}, {'library' if library else 'own kernels'}, 640 slots, TFLOP/s",
            best[name, library],
            bar,
            at_least=True,
        )
        for (name, library), bar in _ATTENTION_BARS.items()
        if (name, library) in best
    )
    return f"{title}\n\n{note}\n\n{_table(head, rows)}\n{bars}"


_ATTENTION_BARS = {
    ("forward", True): 540,
    ("backward", True): 400,
    ("forward", False): 350,
    ("backward", False): 200,
}
"""(pass, whether by the library's packages) -> TFLOP/s."""


EXPERT_SHAPES = {
    "balanced": "49,152 rows over 48 experts",
    "ep48": "98,304 rows over 8 experts, as over 48 ranks",
    "ep96": "98,304 rows over 4 experts, as over 96 ranks",
}
"""Routings of `bench moe` on one GPU."""


def moe(record: dict[str, Any]) -> str:
    """Experts: per phase the fastest variant of each backend, a table a shape; or over ranks."""
    if "ranks" in record:
        return _moe_over_ranks(record)
    checks = record["checks"]
    parts = [
        "## FP8 experts\n\nOne routed layer on one GPU, dim 5120, width 2304; the fastest variant"
        " of each kind of kernel, that of gluon's weight gradients with scales of tiles; a whole"
        " layer of `triton` runs the fastest own ones."
        f" {sum(c['passed'] for c in checks)} of {len(checks)} numeric checks passed."
    ]
    for shape, text in EXPERT_SHAPES.items():
        rows = [row for row in record["rows"] if row["shape"] == shape]
        if rows:
            parts.append(f"{text[0].upper()}{text[1:]}:\n\n{_experts(rows)}".rstrip())
    return "\n\n".join(parts) + "\n"


def _experts(rows: Sequence[dict[str, Any]]) -> str:
    """Phases of one shape."""
    backends = ("gluon", "triton", "deep_gemm", "bf16 torch")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        backend = next((b for b in backends if row["variant"].startswith(b)), None)
        if backend is None:
            continue
        best = found.setdefault(row["phase"], {})
        if backend not in best or row["median_ms"] < best[backend]["median_ms"]:
            best[backend] = row

    def cell(row: dict[str, Any] | None) -> str:
        if row is None:
            return "-"
        rate = f", {row['tflops']:,.0f}" if row["tflops"] else ""
        return f"{row['median_ms']:.2f} ms{rate}"

    def floors(best: dict[str, dict[str, Any]]) -> tuple[str, ...]:
        """The floor, and how many times as long the fastest takes; of records that have floors."""
        fastest = min(best.values(), key=lambda row: row["median_ms"])
        if "floor_ms" not in fastest:
            return ()
        return (_number(fastest["floor_ms"], 2), _number(fastest["ratio_to_floor"], 2))

    lines = (
        (phase, *(cell(best.get(b)) for b in backends), *floors(best))
        for phase, best in found.items()
    )
    more = ("floor ms", "fastest, x floor") if any("floor_ms" in row for row in rows) else ()
    return _table(("phase", *(f"{b}, TFLOP/s" for b in backends), *more), lines)


def _moe_over_ranks(record: dict[str, Any]) -> str:
    """Whole layers by variant, per micro-batch; and transfers by themselves."""
    layers: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        if row["shape"] == "layer":
            variant, _, rest = row["variant"].rpartition(" (")
            num = int(rest.split()[0])
            layers.setdefault(variant, {})[row["phase"]] = row["median_ms"] / num
    by = "bf16 yardstick" if "bf16 yardstick" in layers else next(iter(layers), "")
    base = layers.get(by, {})
    rows = (
        (name, *(cell for phase in ("forward", "fwd + bwd") for cell in (
            (f"{found[phase]:.2f}", f"{base[phase] / found[phase]:.2f}")
            if phase in found and phase in base else ("-", "-"))))
        for name, found in layers.items()
    )  # fmt: skip
    transfers = (
        (r["variant"], r["phase"], f"{r['median_ms']:.2f}", f"{r['num_bytes'] / 1e6:.0f}",
         f"{r['gb_per_second']:.0f}")
        for r in record["rows"] if r["shape"] == "transfer"
    )  # fmt: skip
    checks = record["checks"]
    yardstick = "the first row" if by == next(iter(layers), "") else by
    note = (
        f"One routed layer over {record['ranks']} GPUs, {record['experts']} experts,"
        f" {record['tokens_per_rank']:,} tokens each; per micro-batch, the slowest rank; ratios to"
        f" {yardstick}. {sum(c['passed'] for c in checks)} of {len(checks)} numeric checks"
        " passed. deep_ep sends a token once per rank, torch once per expert."
    )
    head = ("variant", "forward, ms", "ratio", "forward + backward, ms", "ratio")
    parts = [_table(head, rows)] if layers else []
    if any(r["shape"] == "transfer" for r in record["rows"]):
        parts.append(_table(("rows", "phase", "ms", "MB one way", "GB/s"), transfers))
    parts += _moe_phases(record["rows"])
    fused = [
        (r["variant"], r["phase"], f"{r['median_ms']:.2f}", f"{min(r['milliseconds']):.2f}")
        for r in record["rows"]
        if r["shape"] == "fused"
    ]
    if fused:
        parts.append(_table(("fused layer's parts", "phase", "ms", "lowest"), fused))
    pairs: dict[str, dict[str, float]] = {}
    for r in record["rows"]:
        if r["shape"] == "pairs":
            pairs.setdefault(r["variant"], {})[r["phase"]] = r["median_ms"]
    for variant, found in pairs.items():
        in_turn = found["in turn"]
        ways = ((way, f"{ms:.2f}", f"{ms / in_turn:.3f}") for way, ms in found.items())
        what = f"{variant}: two forwards beside two backwards, multiprocessors for each"
        parts.append(_table((what, "ms", "of in turn"), ways))
    return f"## Experts over GPUs\n\n{note}\n\n" + "\n".join(parts)


def _moe_phases(rows: Sequence[dict[str, Any]]) -> Iterable[str]:
    """Phases of whole layers against the yardsticks and their floors; steps of those in bf16."""
    phases = [
        (
            r["variant"],
            r["phase"],
            _number(r["median_ms"] / r["micro_batches"], 2),
            _number(r["tflops"], 0) if r["flops"] else "-",
            _number(r["gb_per_second"], 0),
            _number(r.get("gain_over_bf16"), 2),
            _number(r.get("gain_over_library"), 2),
            _number(r["ratio_to_floor"], 2),
        )
        for r in rows
        if r["shape"] == "phase"
    ]
    if phases:
        head = ("variant", "phase by itself", "ms", "TFLOP/s", "GB/s", "x faster than bf16",
                "x faster than deep_gemm + deep_ep", "x floor")  # fmt: skip
        yield _table(head, phases)
    steps = [(r["variant"], r["phase"], _number(r["median_ms"], 3)) for r in rows
             if r["shape"] == "step"]  # fmt: skip
    if steps:
        yield _table(("variant", "step by itself", "ms"), steps)


def memory(record: dict[str, Any]) -> str:
    """Knobs that save memory, against off and against the plan, a table a case; copies; bars."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in record["rows"]:
        cases.setdefault(row["case"], []).append(row)
    head = ("knob", "step ms", "of off", "peak GB", "planned / measured", "slack GB", "host GB")
    parts = [
        f"## Memory knobs, {record['model']}\n\n"
        "Step: the slowest rank's. Peak: live tensors, rank by rank; planned by the ledger. Slack:"
        " what the allocator held beyond the peak. A row that does not fit by the plan was not"
        " begun.\n"
    ]
    for name, rows in cases.items():
        first = rows[0]
        about = (
            f"{name}: {first['num_experts']} experts, {first['num_micro_batches']} micro-batches,"
            f" {first['in_flight']} in flight, {first['optimizer']}"
        )
        parts.append(f"{about}\n\n{_table(head, (_knob(row, first) for row in rows))}")
    if record["copies"]:
        rates = ((name, _number(rate, 1)) for name, rate in record["copies"].items())
        parts.append(_table(("copies of 1 GiB between host and device", ""), rates))
    planned = [bar for bar in record["bars"] if "planned over measured peak" in bar["what"]]
    others = [bar for bar in record["bars"] if bar not in planned or not bar["is_met"]]
    lines = [
        f"- {sum(b['is_met'] for b in planned)} of {len(planned)} peaks within 3 % of the plan"
    ]
    for bar in others:
        asked = f"at most {bar['most']:g}" if bar["least"] is None else f"at least {bar['least']:g}"
        verdict = "met" if bar["is_met"] else "MISSED"
        lines.append(f"- {verdict}: {bar['what']}: {bar['value']:.4g}, {asked}")
    lines += [f"- {text}" for text in record["notes"]]
    return "\n".join([*parts, "\n".join(lines) + "\n"])


def _knob(row: dict[str, Any], off: dict[str, Any]) -> list[str]:
    """A row of `memory`; `off` has no step where it did not run."""
    if why := row["failure"] or row["refused"]:
        return [row["knob"], why.splitlines()[0], *["-"] * 5]
    seconds = statistics.median(row["step_seconds"])
    base = statistics.median(off["step_seconds"]) if off["step_seconds"] else None
    peaks, ratios, slacks = [], [], []
    for rank in row["ranks"]:
        peak, planned = rank["peak_bytes"], row["plan"]["ranks"][rank["pp_rank"]]["peak_bytes"]
        peaks.append(_number(peak / 1e9 if peak else None, 1))
        ratios.append(_number(planned / peak if peak else None, 3))
        slacks.append(_number(rank["slack_bytes"] / 1e9, 1))
    hosts = [_number(rank["host_bytes"] / 1e9, 1) for rank in row["ranks"]]
    return [
        row["knob"],
        _number(seconds * 1e3, 1),
        _number(seconds / base if base else None, 3),
        *map(", ".join, (peaks, ratios, slacks, hosts)),
    ]


def calibration(record: dict[str, Any]) -> str:
    """Units or stages, transfers, slow-downs and pieces of a step, as projections read them."""
    beside = "" if record["transport"] == "idle" else f", {record['transport']} in flight"
    parts = [
        f"## Calibration, {record['model']}, {record['seq_len']:,} tokens{beside}\n\n"
        "F, I, W: forward, input and weight gradients; medians, and what 95 % of the samples stayed"
        " within. Rows that other commands have added before stay: the one below is the last.\n"
    ]
    ops = ("forward", "input_grad", "weight_grad")

    def times(row: dict[str, Any]) -> list[str]:
        numbers = [(row[f"{op}_s"], row[f"{op}_p95_s"]) for op in ops]
        cells = [f"{1e3 * median:,.2f} ({1e3 * p95:,.2f})" for median, p95 in numbers]
        return [*cells, f"{row['samples']}, {row['origin']}"]

    head = ("F ms (95 %)", "I ms (95 %)", "W ms (95 %)", "samples")
    if units := record["units"]:
        rows = ([row["unit"], row["ac_mode"], *times(row)] for row in units)
        parts.append(_table(("unit", "ac.mode", *head), rows))
    if stages := record["stages"]:
        peaks = {row["stage"]: row["allocated_bytes"] / 1e9 for row in record["peaks"]}
        rows = (
            [str(row["stage"]), *times(row), _number(peaks.get(row["stage"]), 1)] for row in stages
        )
        parts.append(_table(("stage", *head, "peak GB"), rows))
    if transfers := record["transfers"]:
        rows = (
            [
                row["link"],
                f"{row['num_bytes']:,}",
                f"{1e3 * row['seconds']:.3f} ({1e3 * row['p95_s']:.3f})",
                _number(row["num_bytes"] / row["seconds"] / 1e9, 0),
                f"{row['samples']}, {row['origin']}",
            ]
            for row in transfers
        )
        parts.append(_table(("link", "bytes", "one way ms (95 %)", "GB/s", "samples"), rows))
    lines = [
        f"- {row['transport']}: computing takes {100 * row['both_ways']:.1f} % longer;"
        f" {row['source']} ({row['origin']})"
        for row in record["slowdowns"]
    ]
    lines += [
        f"- {row['name']}: {1e3 * row['seconds']:.1f} ms a step; {row['source']} ({row['origin']})"
        for row in record["per_step"]
    ]
    return "\n".join([*parts, *(["\n".join(lines) + "\n"] if lines else [])])


def depths(record: dict[str, Any]) -> str:
    """Whole models of two depths, and what layers between them take."""
    times = zip(record["depths"], record["step_s"], record["step_p95_s"], strict=True)
    rows = [
        [str(depth), f"{1e3 * step:,.1f} ({1e3 * p95:,.1f})", "measured"]
        for depth, step, p95 in times
    ]
    rows.append(["each layer more", f"{1e3 * record['layer_s']:,.1f}", "modelled"])
    rate = record["flops_per_s"] / 1e12
    return (
        f"## Depths, {record['model']}, {record['seq_len']:,} tokens\n\n"
        f"A micro-batch forward and back, {record['samples']} samples, routing {record['routing']};"
        f" {rate:,.0f} TFLOP/s by 6N at {record['num_layers']} layers (modelled: all layers as"
        " those between, no pipeline, nothing that comes once a step).\n\n"
        + _table(("layers", "ms (95 %)", "origin"), rows)
    )


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
    "memory": memory,
    "calibration": calibration,
    "depths": depths,
}


if __name__ == "__main__":
    main()
