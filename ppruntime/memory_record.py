"""Memory over one step: what a rank held behind each op, beside the ledger. Pure; no torch.

A run writes it as memory.json and memory.svg; `ppruntime plan --check RUN` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ppruntime.config.keys import Config
from ppruntime.ledger import RankLedger, predict
from ppruntime.schedules.draw_memory import MemoryBar, MemoryPanel, svg_memory
from ppruntime.text_table import short_bytes


@dataclass(frozen=True, slots=True)
class OpMemory:
    """One op of a rank's order."""

    op: str
    """Its text, or `UPDATE`."""
    live_bytes: int
    """In live tensors, once the op is through."""
    peak_bytes: int
    """The most in live tensors while it ran."""
    reserved_bytes: int | None
    """What the allocator held from the device then; None where there is none."""
    predicted_bytes: int | None = None
    """The ledger's, while the op runs; None where it has none."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One pipeline rank's ops in the order they ran."""

    rank: int
    ops: tuple[OpMemory, ...]

    @property
    def peak(self) -> OpMemory:
        """The first op with the most."""
        return max(self.ops, key=lambda op: op.peak_bytes)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """memory.json: one step of the first pipeline."""

    step: int
    """Counted from 1, as in metrics.jsonl."""
    ranks: tuple[RankMemory, ...]


def beside_the_ledger(config: Config, step: int, ranks: Sequence[RankMemory]) -> StepMemory:
    """The measured ops of all ranks, with what the ledger says of each."""
    ledgers = predict(config)
    pairs = zip(ledgers, ranks, strict=True)
    return StepMemory(step, tuple(_beside(ledger, rank) for ledger, rank in pairs))


def _beside(ledger: RankLedger, measured: RankMemory) -> RankMemory:
    predicted = {m.op: ledger.through_the_step + m.total for m in ledger.moments}
    ops = (replace(op, predicted_bytes=predicted.get(op.op)) for op in measured.ops)
    return RankMemory(measured.rank, tuple(ops))


def write_memory(memory: StepMemory, json_path: Path, svg_path: Path, *, title: str) -> None:
    """Writes both files; a reader sees the old ones or the new ones."""
    panels = [
        MemoryPanel(
            f"{title}, rank {rank.rank}",
            f"measured peak {short_bytes(rank.peak.peak_bytes)} in {rank.peak.op}, "
            f"predicted {_predicted_text(rank)}",
            tuple(
                MemoryBar(op.op, op.live_bytes, op.peak_bytes, op.predicted_bytes)
                for op in rank.ops
            ),
        )
        for rank in memory.ranks
    ]
    for path, content in (
        (json_path, msgspec.json.format(msgspec.json.encode(memory)) + b"\n"),
        (svg_path, svg_memory(panels, show=short_bytes).encode()),
    ):
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(content)
        new.chmod(0o600)
        new.rename(path)


def read_memory(path: Path) -> StepMemory | None:
    """What `write_memory` wrote; None if there is no such file."""
    return msgspec.json.decode(path.read_bytes(), type=StepMemory) if path.exists() else None


def peaks_text(memory: StepMemory) -> str:
    """Where each rank's memory was highest, as predicted and as measured, a line a rank."""
    return "\n".join(
        f"rank {rank.rank}: predicted peak {_predicted_text(rank)}, measured"
        f" {short_bytes(rank.peak.peak_bytes)} in {rank.peak.op}"
        for rank in memory.ranks
    )


def _predicted_text(rank: RankMemory) -> str:
    known = [(op.predicted_bytes, op.op) for op in rank.ops if op.predicted_bytes is not None]
    num_bytes, name = max(known, key=lambda pair: pair[0], default=(0, "no op"))
    return f"{short_bytes(num_bytes)} in {name}"
