"""The V4 models that are compared with transformers, and the numbers the comparison yields.

`tests/oracle/compare_hf.py` runs both sides and writes the golden file; the ordinary tests run our
side alone and expect the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from whole_model import build_units, random_batch

from ppruntime.models.carry import MicroBatch
from ppruntime.models.dims import ModelDims, preset
from ppruntime.models.units import Unit

GOLDEN = Path(__file__).parent / "golden" / "v4_hf.json"


@dataclass(frozen=True)
class Golden:
    """What the other side yields for a case."""

    loss: float
    logits: list[float]
    """The first 8 of the last token of the last row."""
    logits_norm: float
    grad_norms: dict[str, float]
    """By our parameter name."""


@dataclass(frozen=True)
class Case:
    """One model, one batch. `rows`: document lengths per row; `seed`: of weights and tokens."""

    name: str
    dims: ModelDims
    seed: int
    rows: tuple[tuple[int, ...], ...]

    def units(self) -> list[Unit]:
        return build_units(self.dims, self.seed)

    def batch(self) -> MicroBatch:
        return random_batch(self.dims, self.seed, self.rows)


_TINY = replace(preset("tiny-v4"), balance_loss_weight=0.0)
"""Without a balance loss: the other side has another one."""

CASES = (
    Case("tiny", _TINY, 1, ((64,), (64,))),
    Case("packed documents", _TINY, 2, ((5, 41, 16, 3), (65,), (1, 2, 62))),
    Case(
        "other sizes",
        replace(
            _TINY,
            num_layers=5,
            compress_ratios=(4, 8, 0, 8, 4),
            hca_ratio=8,
            hidden_size=48,
            num_heads=6,
            head_dim=40,
            rope_dim=24,
            o_groups=3,
            window=5,
            index_topk=3,
            num_streams=3,
            num_experts=10,
            experts_per_token=3,
            num_hash_layers=1,
        ),
        3,
        ((75,), (75,)),
    ),
    Case(
        "clamped experts, hash layers only",
        replace(_TINY, swiglu_limit=0.05, num_hash_layers=8),
        4,
        ((50, 14),),
    ),
    Case(
        "long, no YaRN, no hash layers",
        replace(_TINY, yarn_factor=1.0, num_hash_layers=0, compress_ratios=(2, 16) * 4),
        5,
        ((200,),),
    ),
)
