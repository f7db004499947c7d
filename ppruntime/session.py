"""One start of a training run, from a checked config to its exit code.

Join, open the run directory and the data, build, resume, train and save, report. What is decided
here is the order of these things and who tells the user; everything else is called.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from ppruntime import checkpoint
from ppruntime.build import build_pipeline
from ppruntime.config import Config, ConfigError, digest, dumps
from ppruntime.data import Batches, open_data
from ppruntime.manifest import CheckpointError, TrainingState, find
from ppruntime.messages import broadcast_bytes, first_complaint
from ppruntime.metrics import MetricsLog, ProgressLine, StepMetrics, mfu, peak_flops
from ppruntime.models.dims import counts
from ppruntime.profiling import align_clocks, gather_step, write_timeline
from ppruntime.ranks import Layout, Ranks, check_world, join, leave, started_rank
from ppruntime.run_dir import ExitCode, RunDir, RunDirError, Status, new_run_dir, open_run
from ppruntime.schedules.ops import ScheduleError
from ppruntime.token_file import DataError
from ppruntime.trainer import NonFiniteError, StepResult, Trainer
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
)
"""Errors that a person can act on: told in a sentence, without a traceback."""

T = TypeVar("T")


def run(config: Config) -> int:
    """Trains as the config says, as one rank of the started world. Gives the exit code."""
    try:
        torch.set_num_threads(config.run.num_threads)
        layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
        check_world(layout)
        if layout.ep > 1:
            raise ConfigError(
                f"parallel.ep = {layout.ep}: the trainer has no expert parallelism yet, only"
                " `ppruntime plan` has; use 1"
            )
        limit = config.fault.init_timeout_seconds
        ranks = join(layout, use_cuda=_wants_cuda(config), timeout_seconds=limit)
        try:
            _train(config, ranks)
        finally:
            leave()
    except tuple(kind for kind, _ in _EXIT_CODES) as error:
        tell(error)
        return exit_code(error)
    return ExitCode.DONE


def exit_code(error: BaseException) -> ExitCode:
    """How a run that ends with `error` ends. What nobody foresaw counts as the rank's death."""
    codes = (code for kind, code in _EXIT_CODES if isinstance(error, kind))
    return next(codes, ExitCode.RANK_DIED)


def tell(error: BaseException) -> None:
    """Prints an error that all ranks have, once, from rank 0."""
    if started_rank() == 0:
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"error: {error}{notes}", file=sys.stderr, flush=True)


def _train(config: Config, ranks: Ranks) -> None:
    with ExitStack() as stack:
        directory = _directory(config, ranks)
        is_first = ranks.rank == 0
        opened = _together(lambda: open_run(directory) if is_first else None, RunDirError, ranks)
        if opened is not None:
            stack.enter_context(opened)
        train_data = _together(lambda: open_data(config), DataError, ranks)
        validation = None
        if config.train.eval_interval is not None:
            validation = _together(lambda: open_data(config, "validation"), DataError, ranks)
        pipeline = build_pipeline(config, ranks)
        stack.callback(pipeline.transport.close)
        trainer = Trainer(config, ranks, pipeline)
        done = _resume(config, ranks, directory, trainer)
        reporter = None
        if opened is not None:
            reporter = stack.enter_context(_Reporter(config, ranks, opened, done))
        _Loop(config, ranks, directory, trainer, train_data, validation, reporter).run(done)


def _wants_cuda(config: Config) -> bool:
    device = config.run.device
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def _together(act: Callable[[], T], kind: type[Exception], ranks: Ranks) -> T:
    """What `act` gives; if it raises `kind` on some rank, all ranks raise that rank's error."""
    complaint, result = None, list[T]()
    try:
        result.append(act())
    except kind as error:
        complaint = str(error)
    heard = first_complaint(complaint, ranks.world_group)
    if heard is not None:
        raise kind(heard)
    return result[0]


def _directory(config: Config, ranks: Ranks) -> Path:
    """The run's directory, chosen by rank 0."""

    def choose() -> bytes:
        if config.run.dir is not None:
            return config.run.dir.encode()
        return str(new_run_dir(Path("runs"), config.model.name)).encode()

    chosen = _together(lambda: choose() if ranks.rank == 0 else b"", RunDirError, ranks)
    return Path(broadcast_bytes(chosen, ranks.world_group).decode())


def _resume(config: Config, ranks: Ranks, directory: Path, trainer: Trainer) -> TrainingState:
    """Loads the newest checkpoint, if there is one and it is wanted; the state to go on from."""
    fresh = TrainingState(step=0, data_cursor=0, tokens=0, config_digest="", layout="")
    latest = find(directory / "ckpt").latest
    resume = config.checkpoint.resume
    if latest is None:
        if resume == "require":
            raise CheckpointError(
                f'{directory} holds no checkpoint and checkpoint.resume = "require";'
                " name a run that has one, or leave the key out"
            )
        return fresh
    if resume == "never":
        raise CheckpointError(
            f'{directory} holds {latest.name} and checkpoint.resume = "never";'
            " name a new run.dir, or leave the key out to go on from it"
        )
    return checkpoint.load(latest, trainer.state_tensors(), group=ranks.world_group)


@dataclass(frozen=True, slots=True)
class _Loop:
    """The steps of one start. Every rank runs it alike; rank 0 has a reporter."""

    config: Config
    ranks: Ranks
    directory: Path
    trainer: Trainer
    train_data: Batches
    validation: Batches | None
    reporter: _Reporter | None

    def run(self, state: TrainingState) -> None:
        """Trains from `state` to the last step."""
        num_steps = self.config.train.steps
        timeline_step = self.config.run.timeline_step
        if timeline_step is None:
            timeline_step = num_steps - 1
        saved = state.step
        for index in range(state.step, num_steps):
            start = time.perf_counter()
            result = self.trainer.step(index, self.train_data)
            seconds = time.perf_counter() - start
            done = index + 1
            val_loss = self._validate(done)
            state = self._state(done)
            if self.reporter is not None:
                self.reporter.step(done, result, seconds, state.tokens, val_loss)
            if index == timeline_step:
                self._write_timeline(done)
            interval = self.config.checkpoint.interval
            if done == num_steps or (interval is not None and done % interval == 0):
                self._save(state)
                saved = done
        if self.reporter is not None:
            self.reporter.finished(num_steps, saved)

    def _validate(self, done: int) -> float | None:
        interval = self.config.train.eval_interval
        if self.validation is None or interval is None or done % interval:
            return None
        return self.trainer.evaluate(self.validation, self.config.train.eval_steps)

    def _state(self, done: int) -> TrainingState:
        config = self.config
        cursor = done * self.train_data.samples_per_step
        return TrainingState(
            step=done,
            data_cursor=cursor,
            tokens=cursor * config.train.seq_len,
            config_digest=digest(config),
            layout=(
                f"pp {config.pp.size} x dp {config.parallel.dp} x ep {config.parallel.ep}, layers"
                f" per stage {[stage.num_layers for stage in self.trainer.pipeline.plan]}"
            ),
        )

    def _save(self, state: TrainingState) -> None:
        checkpoint.save(
            self.directory / "ckpt",
            self.trainer.state_tensors(),
            state,
            group=self.ranks.world_group,
            keep_last=self.config.checkpoint.keep_last,
        )

    def _write_timeline(self, done: int) -> None:
        """The step's ops of the first pipeline, measured and planned."""
        if self.ranks.data_rank != 0:
            return
        group = self.ranks.pipeline_group
        pipeline = self.trainer.pipeline
        measured = gather_step(
            pipeline.order.computations,
            pipeline.training.op_times(),
            offset=align_clocks(group),
            group=group,
        )
        if self.reporter is not None:
            run_dir = self.reporter.run_dir
            title = f"{self.config.model.name}, step {done}"
            write_timeline(measured, run_dir.timeline, run_dir.trace, title=title)


class _Reporter:
    """What rank 0 writes and shows."""

    def __init__(self, config: Config, ranks: Ranks, run_dir: RunDir, state: TrainingState) -> None:
        self.run_dir = run_dir
        self._config = config
        self._num_devices = ranks.layout.world
        self._done = state.step
        self._tokens_per_step = config.global_batch_size * config.train.seq_len
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
        if state.step >= config.train.steps:
            self._progress.note(
                f"{run_dir.path}: nothing to do, step {state.step} of {config.train.steps} is done"
            )
        elif state.step:
            self._progress.note(f"{run_dir.path}: goes on after step {state.step}")
        self._status(state.step, "running", exit_code=None)

    def step(
        self,
        done: int,
        result: StepResult,
        seconds: float,
        tokens: int,
        val_loss: float | None,
    ) -> None:
        """A step is done."""
        self._done = done
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
            val_loss=val_loss,
        )
        self._log.write(metrics)
        self._progress.update(metrics)

    def finished(self, num_steps: int, saved: int) -> None:
        """All steps are done and saved."""
        self._status(num_steps, "done", exit_code=ExitCode.DONE)
        self._progress.note(
            f"{self.run_dir.path}: step {num_steps} done, checkpoint of step {saved} saved"
        )

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes files and the live line. If training failed, status.json says so."""
        if error is not None:
            self._status(self._done, str(error) or type(error).__name__, exit_code=exit_code(error))
        self._log.close()
        self._progress.close()

    def _status(self, step: int, reason: str, *, exit_code: ExitCode | None) -> None:
        latest = find(self.run_dir.checkpoints).latest
        self.run_dir.write_status(
            Status(
                exit=exit_code,
                reason=reason,
                step=step,
                last_checkpoint=latest.name if latest else None,
                resumable=latest is not None and exit_code != ExitCode.DONE,
            )
        )
