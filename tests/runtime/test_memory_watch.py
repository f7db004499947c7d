"""Live bytes around every op: what is counted, when it is gone, and what a run writes of it."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from small_runs import CONFIG, SMALL

from ppruntime.config import load
from ppruntime.ledger import UPDATE, predict
from ppruntime.memory_record import (
    OpMemory,
    RankMemory,
    beside_the_ledger,
    peaks_text,
    read_memory,
    write_memory,
)
from ppruntime.memory_watch import DeviceCounter, MemoryWatch, TensorCounter


def watch_of(*standing: torch.Tensor, other_bytes: int = 0) -> MemoryWatch:
    return MemoryWatch(TensorCounter(standing, other_bytes=other_bytes))


def run(watch: MemoryWatch, **acts) -> dict[str, OpMemory]:
    with watch:
        for _, act in watch.watched(acts.items()):
            act()
    return {op.op: op for op in watch.ops}


def test_memory_counts_from_its_making_to_its_end_and_the_most_within_an_op():
    weight, kept = torch.ones(250), {}

    def forward() -> None:
        x = torch.ones(1000)  # 4,000 bytes
        kept["y"] = (x.view(10, 100) * 2)[:5]  # a view of 4,000 more

    def nothing() -> None:
        pass

    def backward() -> None:
        del kept["y"]
        kept["z"] = torch.ones(100)

    found = run(watch_of(weight, other_bytes=7), F=forward, S=nothing, B=backward)
    base = 1000 + 7
    assert (found["F"].live_bytes, found["F"].peak_bytes) == (base + 4000, base + 8000)
    assert (found["S"].live_bytes, found["S"].peak_bytes) == (base + 4000, base + 4000)
    assert (found["B"].live_bytes, found["B"].peak_bytes) == (base + 400, base + 4000)
    assert found[UPDATE].live_bytes == base + 400
    assert found["F"].reserved_bytes is None


def test_what_autograd_saves_counts_until_its_backward():
    weight = torch.ones(1000, requires_grad=True)
    kept = {}

    def forward() -> None:
        kept["loss"] = (weight.exp() * 3).sum()  # saves the exponential, and 3 as a scalar

    def backward() -> None:
        kept.pop("loss").backward()

    found = run(watch_of(weight), F=forward, B=backward)
    assert found["F"].live_bytes >= 4000 + 4000
    assert found["F"].live_bytes <= 4000 + 4000 + 16
    assert found["B"].live_bytes == 4000 + 4000, "weight and gradient"


def test_memory_that_is_resized_in_place_counts_with_its_new_size():
    gathered = torch.empty(0)
    storage = gathered.untyped_storage()
    found = run(watch_of(gathered), F=lambda: storage.resize_(4096), B=lambda: storage.resize_(0))
    assert (found["F"].live_bytes, found["B"].live_bytes) == (4096, 0)
    assert found["B"].peak_bytes == 4096


def test_memory_that_was_there_is_not_made_by_an_op_that_writes_into_it():
    slot = torch.zeros(1000)

    def fill() -> None:
        slot.view(10, 100).add_(1)

    found = run(watch_of(), F=fill)
    assert found["F"].peak_bytes == 0


def test_what_lies_elsewhere_does_not_count():
    page = torch.empty(1 << 20, dtype=torch.uint8)
    address = page.untyped_storage().data_ptr()
    counter = TensorCounter((), is_elsewhere=lambda storage: storage.data_ptr() == address)
    found = run(MemoryWatch(counter), F=lambda: page[:100].fill_(0))
    assert found["F"].peak_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_allocator_counts():
    device = torch.device("cuda", 0)
    kept = {}

    def forward() -> None:
        kept["y"] = torch.ones(1 << 20, device=device) * 2  # 4 MiB, beside as much

    watch = MemoryWatch(DeviceCounter(device))
    found = run(watch, F=forward, S=lambda: None, B=lambda: kept.clear())
    before = found["B"].live_bytes
    assert found["F"].live_bytes - before == found["S"].peak_bytes - before == 4 << 20
    assert found["F"].peak_bytes - before == 8 << 20
    assert watch.peak_bytes == found["F"].peak_bytes
    assert watch.reserved_bytes >= watch.peak_bytes


def test_a_record_is_written_with_the_ledger_s_numbers_and_reads_back(tmp_path):
    config = load([CONFIG], [*SMALL, "pp.size=2"])
    ledgers = predict(config)
    ranks = [
        RankMemory(
            ledger.rank,
            (*(OpMemory(m.op, 1000, 2000 + i, None) for i, m in enumerate(ledger.moments)),),
        )
        for ledger in ledgers
    ]
    memory = beside_the_ledger(config, 3, ranks)
    write_memory(memory, tmp_path / "memory.json", tmp_path / "memory.svg", title="a <run>")
    assert read_memory(tmp_path / "memory.json") == memory
    assert read_memory(tmp_path / "other.json") is None
    for ledger, rank in zip(ledgers, memory.ranks, strict=True):
        assert max(op.predicted_bytes for op in rank.ops) == ledger.peak_bytes
        line = peaks_text(memory).splitlines()[ledger.rank]
        assert f"in {ledger.peak.op}, measured" in line
        assert line.endswith(f"in {ledger.moments[-1].op}")
    root = ElementTree.parse(tmp_path / "memory.svg").getroot()
    shapes = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert shapes.count("polyline") == 2
    assert shapes.count("title") == 2 * sum(len(rank.ops) for rank in memory.ranks)
