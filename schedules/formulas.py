"""What is known about each order in closed form, as text for tables.

P ranks, V stages a rank, M micro-batches; F, I, W the times of one whole rank, equal on all ranks,
no latency; the numbers in flight are chunk activations on rank r. `tests/schedules` holds these
against the timeline.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Formula:
    """One order. `bubble`: if steps end at a barrier; `span_bubble`: if steps chain."""

    stages_per_rank: str
    bubble: str
    span_bubble: str
    in_flight: str
    transfers: str
    slots: str
    what: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


_ONE = "2M(P-1)"
_LOOP = "2M(PV-1)"
_V = "4M(P-1)"

FORMULAS = {
    "gpipe": Formula(
        stages_per_rank="1",
        bubble="(P-1)(F+I+W)",
        span_bubble="same",
        in_flight="M",
        transfers=_ONE,
        slots="1",
        what="all forwards, then all backwards",
    ),
    "1f1b": Formula(
        stages_per_rank="1",
        bubble="(P-1)(F+I+W)",
        span_bubble="same",
        in_flight="min(M, P-r)",
        transfers=_ONE,
        slots="1",
        what="one forward, one backward",
    ),
    "async_1f1b": Formula(
        stages_per_rank="1",
        bubble="(P-1)(F+I+W)",
        span_bubble="same",
        in_flight="min(M, s(P-1-r)+1)",
        transfers=_ONE,
        slots="1",
        what="1F1B with s times the warm-up; a hop hides 2c <= (s-1)(F+I+W)",
    ),
    "1f1b_w": Formula(
        stages_per_rank="1",
        bubble="(P-1)(F+I)",
        span_bubble="same",
        in_flight="min(M, P-r)",
        transfers=_ONE,
        slots="1",
        what="1F1B that sends a gradient before its W; a hop hides 2c <= W",
    ),
    "interleaved_1f1b": Formula(
        stages_per_rank="V",
        bubble="(P-1)(F+I+W)/V",
        span_bubble="same",
        in_flight="min(MV, (V-1)P + 2(P-1-r) + 1)",
        transfers=_LOOP,
        slots="1",
        what="1F1B over V stages a rank in a loop",
    ),
    "interleaved_zb1p": Formula(
        stages_per_rank="V",
        bubble="(P-1) max(F, I, F+I-W)/V",
        span_bubble="(P-1) max(I, F+I-W)/V",
        in_flight="PV",
        transfers=_LOOP,
        slots="P/2",
        what="ZB-H1 over V stages a rank in a loop",
    ),
    "zb_h1": Formula(
        stages_per_rank="1",
        bubble="(P-1) max(F, I, F+I-W)",
        span_bubble="(P-1) max(I, F+I-W)",
        in_flight="min(M, P)",
        transfers=_ONE,
        slots="1",
        what="W's fill 1F1B's gaps, in 1F1B's memory",
    ),
    "zb_h2": Formula(
        stages_per_rank="1",
        bubble="(P-1) max(F, I-F, F+I-2W)",
        span_bubble="(P-1) max(0, I-F, F+I-2W)",
        in_flight="min(M, 2P-1)",
        transfers=_ONE,
        slots="1",
        what="ZB-H1 with twice the warm-up",
    ),
    "zb_v": Formula(
        stages_per_rank="2",
        bubble="(P-1)F/2 at F=I=W",
        span_bubble="0 at F=I=W",
        in_flight="2P",
        transfers=_V,
        slots="1",
        what="two stages in a V; W's fill the gaps",
    ),
    "v_half": Formula(
        stages_per_rank="2",
        bubble="2.5F 8.5F 20.5F at F=I=W, P=4 8 16",
        span_bubble="same",
        in_flight="about P + 2",
        transfers=_V,
        slots="1",
        what="a V with half of 1F1B's memory",
    ),
    "v_min": Formula(
        stages_per_rank="2",
        bubble="5.5F 13F 29.5F at F=I=W, P=4 8 16",
        span_bubble="same",
        in_flight="about 2P/3 + 2",
        transfers=_V,
        slots="1",
        what="a V with a third of 1F1B's memory",
    ),
    "dualpipe_v": Formula(
        stages_per_rank="2",
        bubble="(P-1)F/2 at F=I=W; pairs fused (P-1)F",
        span_bubble="same",
        in_flight="2P+1",
        transfers=_V,
        slots="1",
        what="a V whose pairs of a forward and a backward may be fused",
    ),
}
