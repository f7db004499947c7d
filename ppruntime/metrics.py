"""What a run reports of each step: metrics.jsonl always, TensorBoard when there, and one line.

Rank 0 alone makes these objects; every other rank passes nothing and prints nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from ppruntime.ledger import MeasuredMemory

_DENSE_BF16_FLOPS = {
    "A100": 312e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "B200": 2250e12,
}
"""Peak dense bf16 FLOP/s by a part of the device's name (SXM data sheets)."""


class MetricsError(ValueError):
    """metrics.jsonl holds a line that is no step: names the file and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One line of metrics.jsonl. A number that is not finite is null there."""

    step: int
    """The step just done, counted from 1."""
    loss: float | None
    """Mean cross-entropy per valid token, over all ranks."""
    grad_norm: float | None
    """Global norm before clipping."""
    lr: float
    """Learning rate used in this step."""
    tokens_per_s: float
    """Tokens of all ranks over `step_seconds`."""
    mfu: float | None
    """Share of peak FLOP/s by the 6ND rule; None where the peak is not known, as on a CPU."""
    step_seconds: float
    """Wall time of the step on rank 0, without validation and saving."""
    tokens: int
    """Tokens since the run's beginning, over all ranks and starts."""
    max_loads: tuple[float, ...] = ()
    """By MoE layer: the busiest expert's tokens over the mean of all experts; 1 is balanced."""
    val_loss: float | None = None
    """Validation loss after this step, where it was measured."""
    index_loss: float | None = None
    """Weighted losses of all indexers, mean over sequences; None while they are frozen."""
    skipped_in_a_row: int = 0
    """Steps up to this one whose update was skipped since loss or norm was not finite; 0: this one
    was updated."""
    memory: tuple[MeasuredMemory, ...] = ()
    """Of each pipeline rank of the first pipeline; `ppruntime plan --check RUN` reads it."""
    resumed_at: int | None = None
    """In a start's first line: the step of the checkpoint it went on from. Earlier lines of later
    steps are of a past that was given up; `read_metrics` leaves them out."""


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOP/s of one device, by its name; None if it is not in the table."""
    return next((flops for part, flops in _DENSE_BF16_FLOPS.items() if part in device_name), None)


def mfu(
    tokens_per_s: float, *, flops_per_token: float, num_devices: int, device_flops: float | None
) -> float | None:
    """Model FLOPs utilisation: tokens/s x 6N over the devices' peak. None without a peak.

    `flops_per_token` is 6 x active matmul parameters: recomputed work and attention's own products
    do not count. Source: Chowdhery et al. 2022 (PaLM), appendix B, without its attention term.
    """
    if device_flops is None:
        return None
    return tokens_per_s * flops_per_token / (num_devices * device_flops)


class MetricsLog:
    """Appends one line a step to a file, and to TensorBoard if it works.

    A line is flushed before `write` returns, and its floats read back as the same floats. Trouble
    with TensorBoard is told once through `warn` and never ends a run.
    """

    def __init__(
        self,
        path: Path,
        *,
        tensorboard: Path | None,
        resumed_at: int = 0,
        warn: Callable[[str], None],
    ) -> None:
        """`tensorboard`: folder for its events, None for none. `resumed_at`: the step of the
        checkpoint this start goes on from, 0 for a start from scratch."""
        self._file = open(path, "ab", opener=_for_us_alone)  # noqa: SIM115 (closed by `close`)
        self._resumed_at: int | None = resumed_at if self._file.tell() else None
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")  # a start that was killed left half a line
        self._warn = warn
        self._board: Any = None  # a third party's type, imported only if wanted
        if tensorboard is not None:
            self._try_board(lambda: self._open_board(tensorboard, resumed_at))

    def write(self, metrics: StepMetrics) -> None:
        """Appends the line; the first one of a start that goes on is marked as such."""
        metrics = replace(metrics, resumed_at=self._resumed_at)
        self._resumed_at = None
        self._file.write(msgspec.json.encode(metrics) + b"\n")
        self._file.flush()
        if self._board is not None:
            self._try_board(lambda: self._write_board(metrics))

    def close(self) -> None:
        """Closes file and board. Idempotent."""
        self._file.close()
        if self._board is not None:
            self._try_board(self._board.close)
            self._board = None

    def _open_board(self, folder: Path, resumed_at: int) -> None:
        if find_spec("tensorboard") is None:
            return  # an extra that is not there is not missed
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def _write_board(self, metrics: StepMetrics) -> None:
        for name, value in asdict(metrics).items():
            if name == "max_loads":
                for layer, load in enumerate(value):
                    self._board.add_scalar(f"max_load/{layer}", load, metrics.step)
            elif value is not None and name not in ("step", "resumed_at", "memory"):
                self._board.add_scalar(name, value, metrics.step)

    def _try_board(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever goes wrong in it, training is worth more
            self._board = None
            self._warn(f"TensorBoard is off: {type(error).__name__}: {error}")


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_metrics(path: Path) -> tuple[StepMetrics, ...]:
    """The steps that led to the newest state, ascending: one line per step, the last one written.

    Where a start went on from a checkpoint, what came after that checkpoint before is left out.
    Half a line that a killed start left behind is passed over. Raises MetricsError for any other
    line that is no step.
    """
    steps: dict[int, StepMetrics] = {}
    broken: int | None = None
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            metrics = msgspec.json.decode(line, type=StepMetrics)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            broken = number if broken is None else broken
            continue
        if broken is not None and metrics.resumed_at is None:
            break  # only a new start follows upon half a line
        broken = None
        if metrics.resumed_at is not None:
            steps = {step: kept for step, kept in steps.items() if step <= metrics.resumed_at}
        steps[metrics.step] = metrics
    else:
        return tuple(steps[step] for step in sorted(steps))
    raise MetricsError(f"{path}:{broken}: not a step of a run; delete the line or restore the file")


class _LastingConsole(Console):
    """A console whose reader may go away (`| head`); rich would end the process then."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class ProgressLine:
    """Shows training: one live line on a terminal, else a line each `interval` steps.

    Output that can no longer be written (a closed pipe) is given up; training goes on.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        interval: int = 1,
        file: TextIO | None = None,
        is_terminal: bool | None = None,
    ) -> None:
        """`file`: where to show it, None for standard output. `is_terminal`: None asks the file."""
        self._console: Console = _LastingConsole(
            file=file, force_terminal=is_terminal, highlight=False, markup=False, emoji=False
        )
        self._num_steps = num_steps
        self._interval = interval
        self._live: Progress | None = None
        if self._console.is_terminal:
            self._live = Progress(
                TextColumn("{task.fields[line]}", markup=False, table_column=Column(no_wrap=True)),
                BarColumn(bar_width=12),
                console=self._console,
                auto_refresh=False,
            )
            self._task = self._live.add_task("step", total=num_steps, line="")
            self._try(self._live.start)

    def update(self, metrics: StepMetrics) -> None:
        """Shows a step that is done."""
        line = progress_text(metrics, num_steps=self._num_steps)
        if self._live is not None:
            live, task = self._live, self._task
            self._try(lambda: live.update(task, completed=metrics.step, line=line, refresh=True))
        elif metrics.step % self._interval == 0 or metrics.step == self._num_steps:
            self.note(line)

    def note(self, text: str) -> None:
        """Prints a line of its own, above the live one."""
        self._try(lambda: self._console.print(Text(text), soft_wrap=True))

    def close(self) -> None:
        """Leaves the last state standing. Idempotent."""
        if self._live is not None:
            self._try(self._live.stop)
            self._live = None

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except OSError:
            self._console.quiet = True


def progress_text(metrics: StepMetrics, *, num_steps: int) -> str:
    """A step in one line, the most important first: a narrow terminal cuts the end off."""
    left = timedelta(seconds=round((num_steps - metrics.step) * metrics.step_seconds))
    parts = [f"step {metrics.step:>{len(str(num_steps))}}/{num_steps}"]
    parts.append(f"loss {_decimals(metrics.loss, 4)}")
    if metrics.val_loss is not None:
        parts.append(f"val {_decimals(metrics.val_loss, 4)}")
    parts.append(f"{metrics.tokens_per_s:,.0f} tok/s")
    if metrics.mfu is not None:
        parts.append(f"mfu {100 * metrics.mfu:.1f} %")
    parts.append(f"{left} left")
    parts += [f"grad {_decimals(metrics.grad_norm, 3)}", f"lr {metrics.lr:.2e}"]
    return "  ".join(parts)


def _decimals(value: float | None, num_decimals: int) -> str:
    return "none" if value is None else f"{value:.{num_decimals}f}"
