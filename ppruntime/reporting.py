"""What a run tells: on the terminal, in its directory while it lasts, and how it ended.

One rank does it, rank 0 unless that is lost.
"""

from __future__ import annotations

import sys
from types import TracebackType

import torch

from ppruntime.config import Config, ConfigError, dumps
from ppruntime.data.token_file import DataError
from ppruntime.experts.exchange import DispatchError
from ppruntime.ledger import MeasuredMemory
from ppruntime.manifest import CheckpointError, TrainingState, find
from ppruntime.metrics import MetricsLog, ProgressLine, StepMetrics, mfu, peak_flops
from ppruntime.models.dims import counts
from ppruntime.models.mega_moe_rules import MeetingError, PoolOverflow
from ppruntime.nonfinite import NonFiniteError
from ppruntime.ranks import Ranks
from ppruntime.run_dir import ExitCode, RunDir, RunDirError, Status
from ppruntime.schedules.ops import ScheduleError
from ppruntime.termination import InterruptedTwiceError, StoppedError
from ppruntime.trainer import StepResult
from ppruntime.transports.agree import DisagreementError
from ppruntime.transports.base import TransportError

_EXIT_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (ConfigError, ExitCode.CONFIG),
    (ScheduleError, ExitCode.CONFIG),
    (RunDirError, ExitCode.ENVIRONMENT),
    (DataError, ExitCode.DATA),
    (CheckpointError, ExitCode.CHECKPOINT),
    (NonFiniteError, ExitCode.NONFINITE),
    (DisagreementError, ExitCode.DISAGREEMENT),
    (TransportError, ExitCode.RANK_DIED),
    (DispatchError, ExitCode.RANK_DIED),
    (MeetingError, ExitCode.RANK_DIED),
    (PoolOverflow, ExitCode.OUT_OF_MEMORY),
    (InterruptedTwiceError, ExitCode.INTERRUPTED),
    (StoppedError, ExitCode.STOPPED),
)
"""Errors that a person can act on: told in a sentence, without a traceback."""

FORESEEN = tuple(kind for kind, _ in _EXIT_CODES)
"""The kinds of these errors."""

LOSS_SECONDS = 1.0
"""How long after a failure the process that caused it may be seen to end."""


def exit_code(error: BaseException) -> ExitCode:
    """How a run that ends with `error` ends. What nobody foresaw counts as the rank's death."""
    codes = (code for kind, code in _EXIT_CODES if isinstance(error, kind))
    return next(codes, ExitCode.RANK_DIED)


def tell(error: BaseException, *, speaks: bool) -> None:
    """Prints an error that all ranks have, once, from the rank that speaks."""
    if speaks:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}", file=sys.stderr, flush=True)


class Record:
    """status.json of a run that this process has open. As a context it notes how training failed,
    and tells the user in the error whether the run can go on."""

    def __init__(self, run_dir: RunDir, ranks: Ranks) -> None:
        before = run_dir.read_status()
        self.run_dir = run_dir
        self._ranks = ranks
        self.num_done = before.step if before else 0

    def write(self, reason: str, *, exit_code: ExitCode | None) -> None:
        """How the run stands after `num_done` steps."""
        self._write(reason, exit_code, culprit=None)

    def __enter__(self) -> Record:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        code, culprit = exit_code(error), None
        if code is ExitCode.RANK_DIED:
            culprit = next(iter(self._ranks.lost(within_seconds=LOSS_SECONDS)), None)
        self._write(str(error) or type(error).__name__, code, culprit=culprit)
        latest = find(self.run_dir.checkpoints).latest
        if latest is not None and code is not ExitCode.CHECKPOINT:
            error.add_note(
                f"start it again with run.dir={self.run_dir.path}: it goes on from {latest.name}"
            )

    def _write(self, reason: str, exit_code: ExitCode | None, *, culprit: int | None) -> None:
        latest = find(self.run_dir.checkpoints).latest
        self.run_dir.write_status(
            Status(
                exit=exit_code,
                reason=reason,
                step=self.num_done,
                last_checkpoint=latest.name if latest else None,
                resumable=latest is not None and exit_code != ExitCode.DONE,
                culprit_rank=culprit,
            )
        )


class Reporter:
    """What rank 0 writes and shows."""

    def __init__(self, config: Config, ranks: Ranks, record: Record, state: TrainingState) -> None:
        self.run_dir = run_dir = record.run_dir
        self._record = record
        self._num_devices = ranks.layout.world
        self._tokens_per_step = config.global_batch_size * config.train.seq_len
        self._max_skips = config.fault.nonfinite_max
        self._flops_per_token = counts(config.model.dims).flops_per_token
        self._device_flops = (
            peak_flops(torch.cuda.get_device_name(ranks.device))
            if ranks.device.type == "cuda"
            else None
        )
        run_dir.add_config(dumps(config))
        self._progress = ProgressLine(config.train.steps, interval=config.run.log_interval)
        self._log = MetricsLog(
            run_dir.metrics,
            tensorboard=run_dir.tensorboard if config.run.tensorboard else None,
            resumed_at=state.step,
            warn=self._progress.note,
        )
        for litter in find(run_dir.checkpoints).incomplete:
            self._progress.note(f"{litter} is ignored: its save did not finish; it can be deleted")
        if state.step >= config.train.steps:
            self._progress.note(
                f"{run_dir.path}: nothing to do, step {state.step} of {config.train.steps} is done"
            )
        elif state.step:
            self._progress.note(f"{run_dir.path}: goes on after step {state.step}")
        record.num_done = state.step
        record.write("running", exit_code=None)

    def step(
        self,
        done: int,
        result: StepResult,
        seconds: float,
        tokens: int,
        val_loss: float | None,
        memory: tuple[MeasuredMemory, ...],
    ) -> None:
        """A step is done."""
        self._record.num_done = done
        tokens_per_s = self._tokens_per_step / seconds
        metrics = StepMetrics(
            step=done,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_per_s=tokens_per_s,
            mfu=mfu(
                tokens_per_s,
                flops_per_token=self._flops_per_token,
                num_devices=self._num_devices,
                device_flops=self._device_flops,
            ),
            step_seconds=seconds,
            tokens=tokens,
            max_loads=result.max_loads,
            val_loss=val_loss,
            index_loss=result.index_loss,
            memory=memory,
            skipped_in_a_row=result.skipped_in_a_row,
        )
        self._log.write(metrics)
        if result.skipped_in_a_row:
            self.note(
                f"skipped the update of step {done}, {result.skipped_in_a_row} of"
                f" {self._max_skips} allowed in a row: loss {result.loss}, gradient norm"
                f" {result.grad_norm}"
            )
        self._progress.update(metrics)

    def note(self, text: str) -> None:
        """Tells the user something that is no step."""
        self._progress.note(text)

    def finished(self, num_steps: int, saved: int, *, ran: bool) -> None:
        """All steps are done, those up to `saved` saved (0: none); `ran`: some of them in this
        start."""
        self._record.write("done", exit_code=ExitCode.DONE)
        if ran:
            kept = f"checkpoint of step {saved} saved" if saved else "no checkpoint"
            self._progress.note(f"{self.run_dir.path}: step {num_steps} done, {kept}")

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes files and the live line."""
        self._log.close()
        self._progress.close()
