"""One start of a training run, from a checked config to its exit code.

Join, open the run directory and the data, build, resume, train and save, report. What is decided
here is the order of these things and who tells the user; everything else is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from ppruntime import checkpoint
from ppruntime.build import build_pipeline
from ppruntime.config import Config, digest
from ppruntime.data.batches import Batches, open_data
from ppruntime.data.token_file import DataError
from ppruntime.experts.exchange import DispatchError
from ppruntime.manifest import CheckpointError, TrainingState, find
from ppruntime.memory_meter import MemoryMeter
from ppruntime.memory_record import RankMemory, beside_the_ledger, write_memory
from ppruntime.memory_watch import MemoryWatch
from ppruntime.messages import any_rank, broadcast_bytes, first_complaint, gather_bytes
from ppruntime.models.mega_moe_rules import MeetingError
from ppruntime.nonfinite import Skips
from ppruntime.profiling import align_clocks, gather_step, write_timeline
from ppruntime.ranks import Layout, Ranks, check_world, join, leave, started_rank
from ppruntime.remedies import out_of_memory_text
from ppruntime.reporting import FORESEEN, LOSS_SECONDS, Record, Reporter, exit_code, tell
from ppruntime.run_dir import ExitCode, RunDirError, new_run_dir, open_run
from ppruntime.termination import StoppedError, Termination
from ppruntime.trainer import Trainer
from ppruntime.transports.base import TransportError

_EXTRA_GRACE_SECONDS = 2.0
"""Ranks other than 0 go on longer once asked to end, so that rank 0 is the one that says so."""

T = TypeVar("T")


def run(config: Config) -> int:
    """Trains as the config says, as one rank of the started world. Gives the exit code."""
    is_first = started_rank() == 0
    grace = config.fault.stop_grace_seconds + (0 if is_first else _EXTRA_GRACE_SECONDS)
    with Termination(grace_seconds=grace, ends_by_signal=not is_first) as termination:
        try:
            torch.set_num_threads(config.run.num_threads)
            layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
            check_world(layout)
            limit = config.fault.init_timeout_seconds
            ranks = join(layout, use_cuda=_wants_cuda(config), timeout_seconds=limit)
        except FORESEEN as error:
            tell(error, speaks=is_first)
            return exit_code(error)
        try:
            with _naming_the_lost(ranks):
                _train(config, ranks, termination)
            ranks.part()
        except FORESEEN as error:
            tell(error, speaks=ranks.speaks)
            ranks.part()
            return exit_code(error)
        finally:
            leave()
    return ExitCode.DONE


@contextmanager
def _naming_the_lost(ranks: Ranks) -> Iterator[None]:
    """Where a collective fails because a process has ended: raises TransportError that says whose,
    in place of the backend's error, which names a socket."""
    try:
        yield
    except RuntimeError as error:
        # Of a peer that did not come to an exchange nobody knows yet whether it has ended.
        if isinstance(error, FORESEEN) and not isinstance(error, DispatchError | MeetingError):
            raise
        if not (lost := ranks.lost(within_seconds=LOSS_SECONDS)):
            raise
        raise _loss(lost, error) from error


def _loss(lost: tuple[int, ...], error: RuntimeError) -> TransportError:
    found = TransportError(
        f"rank {' and rank '.join(map(str, lost))} is lost, the process has ended; its own output"
        " may say why"
    )
    if isinstance(error, DispatchError | MeetingError):
        found.add_note(str(error))
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    return found


def _train(config: Config, ranks: Ranks, termination: Termination) -> None:
    directory = _directory(config, ranks)
    is_first = ranks.rank == 0
    opened = _together(lambda: open_run(directory) if is_first else None, RunDirError, ranks)
    with ExitStack() as stack:
        record = None
        if opened is not None:
            stack.enter_context(opened)
            record = stack.enter_context(Record(opened, ranks))
        else:
            stack.enter_context(_standing_in(directory, ranks))
        stack.enter_context(_naming_the_lost(ranks))
        train_data = _together(lambda: open_data(config), DataError, ranks)
        validation = None
        if config.train.eval_interval is not None:
            validation = _together(lambda: open_data(config, "validation"), DataError, ranks)
        pipeline = build_pipeline(config, ranks)
        stack.callback(pipeline.transport.close)
        trainer = Trainer(config, ranks, pipeline)
        done = _resume(config, ranks, directory, trainer)
        reporter = None
        if record is not None:
            reporter = stack.enter_context(Reporter(config, ranks, record, done))
            for note in pipeline.notes if done.step < config.train.steps else ():
                reporter.note(note)
        parts = (trainer, train_data, validation, reporter, termination)
        _Loop(config, ranks, directory, *parts).run(done)


@contextmanager
def _standing_in(directory: Path, ranks: Ranks) -> Iterator[None]:
    """If training fails and this rank is by then the lowest that lives, it writes the status."""
    try:
        yield
    except TransportError:
        if 0 in ranks.lost(within_seconds=LOSS_SECONDS) and ranks.speaks:
            # Whoever took the directory in the meantime writes a status of its own.
            with suppress(RunDirError), open_run(directory) as opened, Record(opened, ranks):
                raise
        raise


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
    found = find(directory / "ckpt")
    latest, resume = found.latest, config.checkpoint.resume
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
    try:
        state = checkpoint.load(
            latest,
            trainer.state_tensors(),
            group=ranks.world_group,
            residual_type=config.model.dims.residual_type,
        )
        trainer.weights_changed()
        trainer.skips = Skips(state.skipped, state.skipped_in_a_row)
        return state
    except CheckpointError as error:
        if len(found.committed) > 1:
            older = found.committed[-2].name
            error.add_note(f"{older} is older; to go on from it, move {latest} out of the folder")
        raise


@dataclass(frozen=True, slots=True)
class _Loop:
    """The steps of one start. Every rank runs it alike; rank 0 has a reporter."""

    config: Config
    ranks: Ranks
    directory: Path
    trainer: Trainer
    train_data: Batches
    validation: Batches | None
    reporter: Reporter | None
    termination: Termination

    def run(self, state: TrainingState) -> None:
        """Trains from `state` to the last step, or to the first one at whose end some rank has been
        asked to stop: then it is saved and StoppedError raised, on all ranks."""
        num_steps = self.config.train.steps
        timeline_step = self.config.run.timeline_step
        if timeline_step is None:
            timeline_step = num_steps - 1
        first = saved = state.step
        meter = MemoryMeter(self.trainer, rank=self.ranks.pp_rank, device=self.ranks.device)
        for index in range(state.step, num_steps):
            done = index + 1
            start = time.perf_counter()
            meter.start()
            watch = meter.watch() if index == timeline_step and self._watches_memory else None
            with self._in(f"step {done}"), watch or nullcontext():
                result = self.trainer.step(index, self.train_data, watch)
            seconds = time.perf_counter() - start
            with self._in(f"the records of step {done}"):
                memory = meter.gather(self.ranks.pipeline_group, watch)
                val_loss = self._validate(done)
                state = self._state(done)
                if self.reporter is not None:
                    self.reporter.step(done, result, seconds, state.tokens, val_loss, memory)
                if index == timeline_step:
                    self._write_timeline(done)
                if watch is not None:
                    self._write_memory(done, watch)
                asked = self.termination.asked
                stops = any_rank(asked is not None, self.ranks.world_group) and done < num_steps
            interval = self.config.checkpoint.interval
            due = interval is not None and done % interval == 0
            is_last = self.config.checkpoint.save_last and done == num_steps
            if stops or due or is_last:
                with self._in(f"the checkpoint of step {done}"):
                    self._save(state)
                saved = done
            if stops:
                by = asked or "a signal to another rank"
                raise StoppedError(f"stopped by {by} after step {done}, which is saved")
        if self.reporter is not None:
            self.reporter.finished(num_steps, saved, ran=first < num_steps)

    @contextmanager
    def _in(self, place: str) -> Iterator[None]:
        """An error from inside says that this rank was in `place`."""
        try:
            yield
        except Exception as error:
            error.add_note(f"rank {self.ranks.rank} was in {place}")
            if isinstance(error, torch.OutOfMemoryError):
                error.add_note(self._why_out_of_memory())
            raise

    def _why_out_of_memory(self) -> str:
        """The rank's ledger, and what would fit."""
        total = None
        if self.ranks.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.ranks.device).total_memory
        return out_of_memory_text(self.config, self.ranks.pp_rank, total)

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
            residual_type=config.model.dims.residual_type,
            skipped=self.trainer.skips.total,
            skipped_in_a_row=self.trainer.skips.in_a_row,
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

    @property
    def _watches_memory(self) -> bool:
        wanted = self.config.run.memory_timeline
        return self.ranks.device.type == "cuda" if wanted is None else wanted

    def _write_memory(self, done: int, watch: MemoryWatch) -> None:
        """The step's memory of the first pipeline, beside the ledger's."""
        if self.ranks.data_rank != 0:
            return
        mine = msgspec.json.encode(RankMemory(self.ranks.pp_rank, watch.ops))
        found = gather_bytes(mine, self.ranks.pipeline_group)
        if self.reporter is not None:
            run_dir = self.reporter.run_dir
            ranks = [msgspec.json.decode(each, type=RankMemory) for each in found]
            memory = beside_the_ledger(self.config, done, ranks)
            title = f"{self.config.model.name}, step {done}"
            write_memory(memory, run_dir.memory, run_dir.memory_picture, title=title)

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
            pairs_overlap=pipeline.pairs_overlap,
            turns=self.config.moe.compute.turns,
        )
        if self.reporter is not None:
            run_dir = self.reporter.run_dir
            title = f"{self.config.model.name}, step {done}"
            write_timeline(measured, run_dir.timeline, run_dir.trace, title=title)
