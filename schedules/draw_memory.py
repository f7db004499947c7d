"""A picture of memory over one rank's ops: what was live, and a line of what was predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from ppruntime.schedules.draw import nice_step

_HEIGHT, _HEAD, _FOOT, _MARGIN = 160.0, 44.0, 64.0, 84.0
_BAR = 14.0
_LIVE, _PEAK, _PREDICTED = "#7cb9f2", "#d5e6f7", "#cc7a00"


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """One op, in bytes."""

    op: str
    live: float
    """Behind it."""
    peak: float
    """While it ran."""
    predicted: float | None
    """None: not predicted."""


@dataclass(frozen=True, slots=True)
class MemoryPanel:
    """One rank: a title, a line of facts, its ops in their order."""

    title: str
    facts: str
    bars: tuple[MemoryBar, ...]


def svg_memory(panels: Sequence[MemoryPanel], *, show: Callable[[float], str]) -> str:
    """Panels one above the other on one scale of bytes, which `show` writes: a bar an op, dark what
    was live behind it, light the most while it ran; a line for the prediction. Ops and bytes as
    hover text."""
    bars = [bar for panel in panels for bar in panel.bars]
    most = max((max(bar.peak, bar.predicted or 0) for bar in bars), default=0.0) or 1.0
    width = max(_BAR * max((len(p.bars) for p in panels), default=0), 560.0) + 2 * _MARGIN
    body: list[str] = []
    top = 0.0
    for panel in panels:
        body += [
            _text(_MARGIN, top + 20, panel.title, size=15),
            _text(_MARGIN, top + 36, panel.facts),
            *_scale(most, top + _HEAD, width, show),
            *_bars(panel.bars, most, top + _HEAD, show),
        ]
        top += _HEAD + _HEIGHT + _FOOT
    body += _legend(top)
    height = top + 30
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _bars(
    bars: Sequence[MemoryBar], most: float, top: float, show: Callable[[float], str]
) -> list[str]:
    parts, line = [], []
    bottom = top + _HEIGHT
    for i, bar in enumerate(bars):
        x = _MARGIN + i * _BAR
        hover = f"{bar.op}: {show(bar.live)} behind it, {show(bar.peak)} at the most"
        if bar.predicted is not None:
            hover += f", predicted {show(bar.predicted)}"
            y = bottom - bar.predicted / most * _HEIGHT
            line += [f"{x:.1f},{y:.2f}", f"{x + _BAR:.1f},{y:.2f}"]
        for value, fill in ((bar.peak, _PEAK), (bar.live, _LIVE)):
            height = value / most * _HEIGHT
            parts.append(
                f'<rect x="{x:.1f}" y="{bottom - height:.2f}" width="{_BAR - 1:.1f}" '
                f'height="{height:.2f}" fill="{fill}"><title>{escape(hover)}</title></rect>'
            )
        label = f'<g transform="translate({x + _BAR * 0.7:.1f} {bottom + 4:.1f}) rotate(-90)">'
        parts.append(label + _text(0, 0, bar.op, size=8, anchor="end") + "</g>")
    parts.append(
        f'<polyline points="{" ".join(line)}" fill="none" stroke="{_PREDICTED}" stroke-width="2"/>'
    )
    return parts


def _scale(most: float, top: float, width: float, show: Callable[[float], str]) -> list[str]:
    step, parts = nice_step(most / 5), []
    for i in range(int(most / step * (1 + 1e-9)) + 1):
        y = top + _HEIGHT - i * step / most * _HEIGHT
        parts.append(
            f'<line x1="{_MARGIN:.0f}" y1="{y:.1f}" x2="{width - _MARGIN:.0f}" y2="{y:.1f}" '
            'stroke="#dddddd"/>'
        )
        parts.append(_text(_MARGIN - 6, y + 4, show(i * step) if i else "0", anchor="end"))
    return parts


def _legend(top: float) -> list[str]:
    parts, x = [], _MARGIN
    for fill, name in (
        (_LIVE, "live behind the op"),
        (_PEAK, "the most while it ran"),
        (_PREDICTED, "predicted"),
    ):
        parts.append(f'<rect x="{x:.0f}" y="{top:.0f}" width="14" height="14" fill="{fill}"/>')
        parts.append(_text(x + 19, top + 11, name))
        x += 40 + 6.2 * len(name)
    return parts


def _text(x: float, y: float, text: str, *, size: float = 11, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'fill="#222222">{escape(text)}</text>'
    )
