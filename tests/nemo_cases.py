"""The V4.1 models that are compared with nemo-automodel, and the numbers the comparison yields.

`tests/oracle/compare_nemo.py` runs both sides and writes the golden files; the ordinary tests run
our side alone and expect the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from whole_model import build_units, byte_token_map, random_batch, set_token_map

from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import ModelDims, preset
from ppruntime.models.units import Unit

GOLDEN = Path(__file__).parent / "golden" / "v41_nemo.json"


@dataclass(frozen=True)
class Golden:
    """What the other side yields for a case."""

    parameters: int
    loss: float
    logits: list[float]
    """The first 8 of the last token of the last row."""
    logits_norm: float
    grad_norms: dict[str, float]
    """By our names."""


@dataclass(frozen=True)
class Case:
    """One model and one batch: `rows` has document lengths, `seed` is of weights and tokens."""

    name: str
    dims: ModelDims
    seed: int
    rows: tuple[tuple[int, ...], ...]
    logits_bound: float
    """Largest ||ours - theirs|| / ||theirs|| of the logits."""
    grads_bound: float
    """The same for the gradient of each parameter."""

    def units(self) -> list[Unit]:
        units = build_units(self.dims, self.seed)
        set_token_map(units, byte_token_map())
        return units

    def batch(self) -> MicroBatch:
        return random_batch(self.dims, self.seed, self.rows)


_TINY = replace(preset("tiny"), engram_compressed_vocab=227, balance_loss_weight=0.0)
_OTHER_SCHEDULE = replace(
    _TINY,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1),
    kv_sources=(1, 4),
    index_sources=(1, 3, 4, 5, 7),
    engram_layers=(0, 3),
)
_WHOLE = ((64,), (64,))
_PACKED = ((21, 1, 2, 40), (7, 50, 7))

_EXACT = {"logits_bound": 1e-5, "grads_bound": 1e-4}
_ROUNDED = {"logits_bound": 5e-5, "grads_bound": 3e-4}
"""Where values are rounded to a few bits, one that falls on the other side counts for more."""

# Seeds at which no Engram gate lies so near 0, and no value so near a rounding boundary, that
# fp32 rounding shows: `compare_nemo.py --seed N` tells what others give, and how far from fp64.
CASES = (
    Case("tiny", _TINY, 8, _WHOLE, **_EXACT),
    Case("cache quantised", replace(_TINY, quantize_cache=True), 7, _WHOLE, **_ROUNDED),
    Case("other schedule", _OTHER_SCHEDULE, 2, _WHOLE, **_EXACT),
    Case(
        "other schedule, cache quantised",
        replace(_OTHER_SCHEDULE, quantize_cache=True),
        6,
        _WHOLE,
        **_ROUNDED,
    ),
    Case("packed documents", _TINY, 8, _PACKED, **_EXACT),
)
