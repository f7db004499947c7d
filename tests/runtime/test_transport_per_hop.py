"""`pp.transport` as a list, one for each hop, and what "auto" says that it took."""

from __future__ import annotations

import json

import pytest
from small_runs import CONFIG, checkpoint_digest, train

from ppruntime.config import ConfigError, load, one_transport
from ppruntime.connect import kinds_note, make_outline


def _losses(run_dir):
    rows = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows]


def test_each_hop_by_a_transport_of_its_own_changes_no_bit_and_auto_tells_what_it_took(
    run_ranks, tmp_path
):
    runs = {
        "one": "gloo",
        "each": '["gloo","shared_memory"]',
        "some": '["auto","gloo"]',
    }
    said = {}
    for name, transport in runs.items():
        overrides = ("pp.size=3", f"pp.transport={transport}", "train.steps=2")
        results = run_ranks(3, train, str(tmp_path / name), overrides)
        assert [code for code, *_ in results] == [0, 0, 0], results
        said[name] = "".join(results[0][1:])
    assert len({tuple(_losses(tmp_path / name)) for name in runs}) == 1
    assert len({checkpoint_digest(tmp_path / name) for name in runs}) == 1
    assert 'pp.transport = "auto" took shared_memory' in said["some"]
    assert not any("took" in said[name] for name in ("one", "each"))


def _outline(*keys):
    config = load([CONFIG], ["run.device=cuda", *keys])
    return config, make_outline(config).channels


def test_the_note_names_hops_where_auto_took_several_kinds_and_leaves_out_what_stays_inside():
    config, channels = _outline("pp.size=4", "pp.schedule=zb_v", "model.num_layers=8")
    took = {c.id: "put" if {c.src_rank, c.dst_rank} == {1, 2} else "copy_engine" for c in channels}
    assert kinds_note(config, channels, took) == (
        'pp.transport = "auto" took copy_engine between stages 0-1, 2-3, 4-5, 6-7 and put between'
        " stages 1-2, 5-6"
    )
    assert kinds_note(config, channels, {}) == ""  # nothing leaves the rank
    config, channels = _outline("pp.size=3", 'pp.transport=["auto","put"]')
    took = {c.id: "copy_engine" if 0 in (c.src_stage, c.dst_stage) else "put" for c in channels}
    assert kinds_note(config, channels, took) == 'pp.transport = "auto" took copy_engine'
    config, channels = _outline("pp.size=3", "pp.transport=put")
    assert kinds_note(config, channels, {c.id: "put" for c in channels}) == ""


def test_what_crosses_one_hop_alone_takes_no_list():
    config = load([CONFIG], ["pp.size=3", 'pp.transport=["put","nccl"]'])
    with pytest.raises(ConfigError, match=r'names one for each hop.*name one, such as "put"$'):
        one_transport(config)
    assert one_transport(load([CONFIG], ["pp.size=3", "pp.transport=nccl"])) == "nccl"
