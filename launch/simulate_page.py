"""One HTML page of a simulated step, with pictures as SVG in it; it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ppruntime.launch.simulate_report import Report
from ppruntime.projection.simulate import CAUSES
from ppruntime.schedules.draw import Panel, nice_step, svg
from ppruntime.schedules.timeline import TimedOp
from ppruntime.text_table import short_bytes

_COLOURS = {
    "work": "#1f6fb8",
    "fill": "#bbbbbb",
    "drain": "#dddddd",
    "dependency": "#cc7a00",
    "transfer": "#a33b78",
    "host": "#1e8a55",
    "noise": "#8c8c3a",
    "interference": "#c0392b",
}
_STYLE = (
    "body{font-family:Helvetica,Arial,sans-serif;margin:2em auto;max-width:72em;color:#222}"
    "h1{font-size:1.3em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}"
    "td,th{padding:.15em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.wide{overflow-x:auto}"
)
_WIDTH = 860.0
_CYCLES = 1.5
"""Length of each zoomed picture, in pipe-fulls."""


def page(report: Report) -> str:
    """The whole page."""
    facts = [report.origins, report.interval, report.bubble, *report.conditions]
    parts = [
        f"<h1>{escape(report.headline)}</h1>",
        "".join(f"<p>{escape(fact)}</p>" for fact in facts),
        "<h2>From ideal to projected MFU</h2>",
        _waterfall(report),
        "<h2>Where each rank's time goes</h2>",
        _ranks(report),
        "<h2>The step's beginning</h2>",
        f'<div class="wide">{_window(report, at_end=False)}</div>',
        "<h2>The step's end</h2>",
        f'<div class="wide">{_window(report, at_end=True)}</div>',
    ]
    if report.simulation.memory:
        parts += ["<h2>Memory over time</h2>", _memory(report)]
    parts += ["<h2>Critical path</h2>", _path(report), "<h2>What it rests on</h2>", _inputs(report)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(report.headline)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _waterfall(report: Report) -> str:
    rungs = report.simulation.rungs
    most = max(rung.mfu for rung in rungs)
    body, top = [], 6.0
    for rung in rungs:
        width = 420 * rung.mfu / most
        body.append(_text(330, top + 14, rung.name, anchor="end"))
        body.append(_rect(340, top, width, 18, _COLOURS["work"], rung.name))
        body.append(_text(346 + width, top + 14, f"{100 * rung.mfu:.2f} %, {rung.step_s:.4g} s"))
        top += 24
    return _svg(_WIDTH + 60, top + 4, body)


def _ranks(report: Report) -> str:
    step = report.simulation.step
    scale = (_WIDTH - 80) / step.makespan
    body, top = [], 4.0
    for rank, (work, lost) in enumerate(zip(step.work, step.lost, strict=True)):
        x = 70.0
        body.append(_text(62, top + 13, f"rank {rank}", anchor="end"))
        for name, took in (("work", work), *zip(CAUSES, lost, strict=True)):
            # Of times that are differences, rounding is left over.
            seconds = took if abs(took) > 1e-9 * step.makespan else 0.0
            width = max(0.0, seconds) * scale
            hover = f"rank {rank}: {name} {seconds:.4g} s"
            body.append(_rect(x, top, width, 16, _COLOURS[name], hover))
            x += width
        top += 20
    x = 70.0
    for name in ("work", *CAUSES):
        body.append(_rect(x, top + 6, 12, 12, _COLOURS[name], name))
        body.append(_text(x + 16, top + 16, name))
        x += 30 + 7 * len(name)
    return _svg(_WIDTH, top + 26, body)


def _window(report: Report, *, at_end: bool) -> str:
    """The first or last pipe-fulls, times counted from the window's start."""
    step = report.simulation.step
    busiest = max(1e-12, max(step.work) / report.parts.schedule.num_micro_batches)
    length = min(step.makespan, _CYCLES * (report.parts.schedule.num_ranks + 2) * busiest)
    start = step.makespan - length if at_end else 0.0
    rows: list[list[TimedOp]] = [
        [
            timed._replace(start=timed.start - start, finish=timed.finish - start)
            for timed in row
            if timed.start >= start and timed.finish <= start + length
        ]
        for row in step.rows
    ]
    facts = f"{start:.4g} s to {start + length:.4g} s of {step.makespan:.4g} s"
    return svg([Panel(report.parts.schedule.name, facts, rows)], unit="s")


def _memory(report: Report) -> str:
    simulation = report.simulation
    most = max(simulation.peak_bytes) or 1.0
    across, down = (_WIDTH - 110) / simulation.step.makespan, 260 / most
    body = []
    tick = nice_step(most / 5)
    for i in range(int(most / tick) + 1):
        y = 280 - i * tick * down
        body.append(f'<line x1="80" y1="{y:.1f}" x2="{_WIDTH - 30}" y2="{y:.1f}" stroke="#ddd"/>')
        body.append(_text(74, y + 4, short_bytes(i * tick) if i else "0", anchor="end"))
    for rank, points in enumerate(simulation.memory):
        hue = 300 * rank / max(1, len(simulation.memory) - 1)
        path, last = [], -1.0
        for point in points:
            x = 80 + point.time * across
            if x - last >= 0.5:  # half a pixel apart is all that can be seen
                path.append(f"{x:.1f},{280 - point.bytes_held * down:.1f}")
                last = x
        name = f"rank {rank}: at most {short_bytes(simulation.peak_bytes[rank])}"
        body.append(
            f'<polyline points="{" ".join(path)}" fill="none" stroke="hsl({hue:.0f},60%,45%)">'
            f"<title>{escape(name)}</title></polyline>"
        )
    rows = [(f"rank {rank}", short_bytes(peak)) for rank, peak in enumerate(simulation.peak_bytes)]
    return _svg(_WIDTH, 290, body) + _table(("rank", "at most"), rows)


def _path(report: Report) -> str:
    simulation = report.simulation
    total = sum(simulation.path_s.values()) or 1.0
    rows = [
        (cause, f"{seconds:.4g}", f"{100 * seconds / total:.2f}")
        for cause, seconds in simulation.path_s.items()
    ]
    rows += [
        (f"compute of stage {stage}", f"{seconds:.4g}", f"{100 * seconds / total:.2f}")
        for stage, seconds in enumerate(simulation.path_by_stage_s)
    ]
    return _table(("on the critical path", "s", "%"), rows)


def _inputs(report: Report) -> str:
    rows = [
        (name, f"{number.value:.6g} {number.unit}", str(number.origin), number.source)
        for name, number in {**report.inputs, **report.goodput}.items()
    ]
    for index, stage in enumerate(report.parts.stages):
        sources = "; ".join(sorted({piece.source for piece in stage.pieces}))
        work = sum(p.forward_s + p.input_grad_s + p.weight_grad_s for p in stage.pieces)
        rows.append((f"stage {index}", f"{1e3 * work:.4g} ms", str(stage.origin), sources))
    for index, hop in enumerate(report.parts.hops):
        times = f"{1e3 * hop.forward_s:.4g} ms there, {1e3 * hop.backward_s:.4g} ms back"
        rows.append((f"hop {index}", times, str(hop.origin), hop.source))
    rows += [
        (piece.name, f"{piece.seconds:.4g} s a step", piece.origin, piece.source)
        for piece in report.parts.per_step
    ]
    return _table(("number", "value", "origin", "source"), rows)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _svg(width: float, height: float, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">'
        + "".join(body)
        + "</svg>"
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, hover: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" fill="{fill}">'
        f"<title>{escape(hover)}</title></rect>"
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" text-anchor="{anchor}" fill="#222">'
        f"{escape(text)}</text>"
    )
