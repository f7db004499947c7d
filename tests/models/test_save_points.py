"""Save points: the names that a run may list are those of the ops that half layers run."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

from ppruntime import models
from ppruntime.models.save_points import (
    ALIASES,
    SAVE_NAMES,
    SavePoint,
    is_kept,
    names_in,
    op_name,
    point_of,
)

NOT_IN_A_FORWARD = frozenset({"mhc_weight_grad", "split", "sum_engram_rows"})
"""Ops of backwards that are not named so."""
OF_THE_HEAD = frozenset({"head_softmax_grad"})
"""Which is never recomputed."""


def registered() -> set[str]:
    """Names of all ops of the models room, its kernels included."""
    for module in pkgutil.walk_packages(models.__path__, f"{models.__name__}."):
        importlib.import_module(module.name)
    names = {str(schema.name) for schema in torch._C._jit_get_all_schemas()}
    return {name.removeprefix("ppruntime::") for name in names if name.startswith("ppruntime::")}


def test_a_run_may_name_every_op_of_a_half_layer_s_forward_and_no_other():
    ops = {name for name in registered() if not name.endswith("_backward")}
    named = {*SAVE_NAMES, *ALIASES} - {*SavePoint, "mm"}
    assert named == ops - NOT_IN_A_FORWARD - OF_THE_HEAD


def test_products_of_torch_are_one_name():
    assert {op_name(f"aten::{name}") for name in ("mm", "addmm", "_scaled_mm")} == {"mm"}
    assert op_name("aten::add.Tensor") == "aten::add.Tensor"
    assert is_kept(frozenset({"mm"}), "aten::addmm")
    assert not is_kept(frozenset({"mm"}), "ppruntime::rms_norm")


@pytest.mark.parametrize("name", ALIASES)
def test_an_op_that_stands_for_another_is_kept_with_it(name):
    assert op_name(name) in SAVE_NAMES
    assert name not in SAVE_NAMES
    assert is_kept(frozenset({op_name(name)}), f"ppruntime::{name}")
    assert point_of(name) == point_of(op_name(name))


def test_a_group_keeps_what_belongs_to_it_and_new_ops_named_by_its_rule():
    for name in set(SAVE_NAMES) - {*SavePoint}:
        kept_by = {point for point in SavePoint if is_kept(frozenset({point}), name)}
        assert kept_by == ({point_of(name)} - {None}), name
    assert point_of("ppruntime::expert_something_new") is SavePoint.EXPERTS
    assert point_of("ppruntime::some_new_linear") is SavePoint.PROJECTIONS
    assert point_of("_c10d_functional::all_to_all_single") is SavePoint.EXPERTS
    assert point_of("ppruntime::sparse_attention_backward") is None
    assert point_of("other::expert_rows") is None


def test_a_half_has_the_names_of_its_own_kind_residual_and_engram():
    attention = names_in(is_moe=False, has_engram=False)
    moe = names_in(is_moe=True, has_engram=False)
    assert {"attention", "rotate", "mhc_read", "projections"} <= attention
    assert not attention & {"experts", "route", "engram", "gate_engram", "one_stream_write"}
    assert {"experts", "route", "mhc_write"} <= moe
    assert not moe & {"attention", "rotate", "engram_rows"}
    with_engram = names_in(is_moe=False, has_engram=True)
    assert with_engram - attention == {"engram", "engram_rows", "engram_linear", "gate_engram"}
    one_stream = names_in(is_moe=True, has_engram=False, has_mhc=False)
    assert one_stream ^ moe == {"mhc_read", "mhc_write", "one_stream_read", "one_stream_write"}
