"""`ppruntime plan --check RUN`: a run's memory as predicted and as measured."""

from __future__ import annotations

from pathlib import Path

from ppruntime.config import ConfigError, load
from ppruntime.ledger import check_text
from ppruntime.memory_record import peaks_text, read_memory
from ppruntime.metrics import read_metrics


def run_check_text(run_dir: Path) -> str:
    """Predicted beside measured, of the last step of the run's last start.

    Raises ConfigError where the directory holds no run or a run without memory numbers.
    """
    configs = sorted(run_dir.glob("config-*.toml"))
    metrics = run_dir / "metrics.jsonl"
    if not configs or not metrics.exists():
        raise ConfigError(
            f"{run_dir} holds no run, which has config-NN.toml and metrics.jsonl; name a run.dir"
        )
    last = next((step for step in reversed(read_metrics(metrics)) if step.memory), None)
    if last is None:
        raise ConfigError(f"{metrics} has no memory numbers yet; a step of the run writes them")
    title = f"{run_dir}, step {last.step}, {configs[-1].name}"
    text = f"{title}\n\n{check_text(load([configs[-1]]), last.memory)}"
    if (over_a_step := read_memory(run_dir / "memory.json")) is not None:
        text += f"\n\nover step {over_a_step.step}, see memory.svg:\n{peaks_text(over_a_step)}"
    return text
