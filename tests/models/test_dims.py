import subprocess
import sys

import pytest
import torch
from msgspec.structs import replace

from ppruntime.models import carry
from ppruntime.models.dims import (
    CROSSING,
    ModelError,
    Role,
    UnitKind,
    boundary_bytes,
    counts,
    forward_flops_per_token,
    preset,
    unit_parameters,
    unit_specs,
    validate,
)
from ppruntime.models.presets import PRESETS
from ppruntime.models.units import build_unit

FLASH = preset("v41-flash")


def test_dims_imports_without_torch():
    code = "import sys, ppruntime.models.dims; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_counts_of_v41_flash_are_exact():
    totals = counts(FLASH)
    assert totals.parameters == 551_566_149_744
    assert totals.active_matmul_parameters == 16_129_982_464
    assert totals.engram_table_parameters == (384_006_168 + 384_016_682) * 256
    assert totals.engram_parameters == totals.engram_table_parameters + 2 * (
        157_286_400 + 2 * 4 * 5120
    )
    assert totals.flops_per_token == 6 * 16_129_982_464


def test_counts_of_v4_flash_are_exact():
    totals = counts(preset("v4-flash"))
    assert totals.parameters == 284_332_230_231
    assert totals.active_matmul_parameters == 13_268_221_952
    assert totals.engram_parameters == 0


def test_counts_of_small_models():
    tiny = counts(preset("tiny"))
    assert tiny.parameters + tiny.engram_parameters == 1_214_416
    proxies = [replace(preset("v41-proxy-8"), num_experts=n) for n in (16, 64, 384)]
    totals = [counts(dims).parameters + counts(dims).engram_parameters for dims in proxies]
    assert totals == [8_305_038_000, 21_896_549_040, 112_506_622_640]


@pytest.mark.parametrize("name", PRESETS)
def test_modules_have_just_the_parameters_of_the_plan(name):
    dims = preset(name)
    seen = set()
    for spec in unit_specs(dims):
        planned = unit_parameters(dims, spec)
        key = tuple((p.name, p.shape) for p in planned)
        if key in seen:
            continue
        seen.add(key)
        unit = build_unit(dims, spec, device="meta", dtype=torch.bfloat16)
        built = {
            local: (tuple(p.shape), p.dtype is torch.float32, not p.requires_grad)
            for local, p in unit.named_parameters()
        }
        assert built == {p.name: (p.shape, p.fp32, p.frozen) for p in planned}, spec.name
    assert len(seen) >= 5


def test_all_presets_are_valid():
    assert [problem for name in PRESETS for problem in validate(preset(name))] == []


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ModelError, match=r"no model 'v5'.*v41-flash"):
        preset("v5")


def test_roles_of_v41_flash():
    roles = [spec.role for spec in unit_specs(FLASH) if spec.kind is UnitKind.ATTENTION]
    assert [i for i, role in enumerate(roles) if role is Role.SWA] == [0, 1]
    assert [i for i, role in enumerate(roles) if role is Role.FULL] == [2, 8, 14, 20]
    assert [i for i, role in enumerate(roles) if role is Role.REINDEX] == [24, 28, 32, 36]
    assert roles.count(Role.REUSE) == 30


def test_roles_of_v4_flash():
    roles = [
        spec.role for spec in unit_specs(preset("v4-flash")) if spec.kind is UnitKind.ATTENTION
    ]
    assert (roles.count(Role.SWA), roles.count(Role.CSA), roles.count(Role.HCA)) == (2, 21, 20)


SLOT_BYTES = 8192 * 640 * 4
"""With the window's 128 slots; the report's top-k alone is 4,194,304 bytes less."""
LIVE = [
    ([*range(4), 14, 15, 26, 27, 38, 39, 78, 79], (), 335_675_392),
    (
        [*range(4, 14), *range(16, 26), *range(28, 38)],
        ("kv", "slots"),
        335_675_392 + 4_194_304 + SLOT_BYTES,
    ),
    (
        [*range(40, 46), *range(48, 54), *range(56, 62), *range(64, 70)],
        ("kv", "index_keys", "slots", "candidates"),
        335_675_392 + 8_388_608 + 2_097_152 + SLOT_BYTES,
    ),
    (
        [46, 47, 54, 55, 62, 63, 70, 71],
        ("kv", "index_keys", "candidates"),
        335_675_392 + 8_388_608 + 2_097_152,
    ),
    ([*range(72, 78)], ("kv", "slots"), 335_675_392 + 8_388_608 + SLOT_BYTES),
]


@pytest.mark.parametrize(("halves", "shared", "num_bytes"), LIVE)
def test_what_lives_after_each_half_of_v41_flash(halves, shared, num_bytes):
    halves_of_model = unit_specs(FLASH)[1:-1]
    for half in halves:
        spec = halves_of_model[half]
        assert spec.live_after == ("streams", "mix", *shared), spec.name
        assert boundary_bytes(FLASH, spec, 1, 8192) == num_bytes, spec.name


def test_the_table_of_live_fields_covers_every_half():
    assert sorted(half for halves, _, _ in LIVE for half in halves) == list(range(80))


def test_candidates_take_bytes_only_where_they_can_exclude():
    spec = next(spec for spec in unit_specs(FLASH) if spec.name == "layers.20.moe")
    inert, binding = (boundary_bytes(FLASH, spec, 1, length) for length in (16384, 32768))
    assert binding - 2 * inert == 32768 * 32768 // 8


def test_only_streams_cross_in_v4():
    specs = unit_specs(preset("v4-flash"))
    assert {spec.live_after for spec in specs[:-1]} == {("streams",)}


def test_crossing_fields_are_the_carrys():
    assert CROSSING == carry.CROSSING
    assert set(CROSSING) <= set(carry.Carry._fields)


def test_flops_of_each_kind_of_unit():
    flops = {spec.name: forward_flops_per_token(FLASH, spec, 8192) for spec in unit_specs(FLASH)}
    expected = {  # MFLOP: products with weights, attention over slots, index scores
        "layers.0.attn": (254.2, 16.8, 0),
        "layers.1.attn": (254.2 + 314.6, 16.8, 0),
        "layers.2.attn": (275.6, 83.9, 16.8),
        "layers.3.attn": (254.2, 83.9, 0),
        "layers.20.attn": (270.4, 83.9, 33.6),
        "layers.24.attn": (265.0, 83.9, 33.6),
        "layers.24.moe": (500.4, 0, 0),
        "head": (1323.8, 0, 0),
    }
    for name, (matmul, attention, scores) in expected.items():
        assert flops[name].matmul / 1e6 == pytest.approx(matmul, abs=0.06), name
        assert flops[name].attention / 1e6 == pytest.approx(attention, abs=0.06), name
        assert flops[name].index_scores / 1e6 == pytest.approx(scores, abs=0.06), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": (0, 0)}, "compress_ratios has 2 entries for 8 layers"),
        ({"kv_sources": (4,)}, "layer 2 has no kv source at or before it"),
        ({"kv_sources": (2,), "candidate_source": None}, "its kv source 2 has 2"),
        ({"index_sources": (2, 6)}, "layer 4 is in kv_sources; it has to be in index_sources"),
        ({"index_sources": (0, 2, 4, 6)}, "layer 0 is a source, but its compress_ratio is 0"),
        ({"index_sources": (2, 4, 9)}, "has to be ascending layer numbers below 8"),
        ({"candidate_source": 2}, "it has to be the last"),
        ({"candidate_source": 6}, "candidate_source 6 has to be one of kv_sources [2, 4]"),
        ({"rope_dim": 15}, "rope_dim is 15; it has to be even"),
        ({"o_groups": 3}, "o_groups 3 does not divide num_heads 4"),
        ({"experts_per_token": 9}, "experts_per_token is 9, but num_experts is 8"),
        ({"window": 0}, "window is 0; it has to be at least 1"),
        ({"num_hash_layers": 1}, "only family v4 has hash layers"),
        ({"engram_pad_id": 256}, "engram_pad_id 256 is not a token id"),
        ({"engram_heads": 0}, "engram_heads is 0; with engram_layers"),
        ({"norm_eps": 0.0}, "norm_eps 0.0"),
        ({"balance_loss_weight": -1.0}, "balance_loss_weight is -1.0"),
    ],
)
def test_wrong_sizes_are_named(changes, message):
    problems = validate(replace(preset("tiny"), **changes))
    assert any(message in problem for problem in problems), problems


def test_v4_refuses_what_only_v41_has():
    problems = validate(replace(preset("tiny-v4"), engram_layers=(1,), quantize_cache=True))
    assert len(problems) == 2
    assert all("only family v41 has it" in problem for problem in problems)
