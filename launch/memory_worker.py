"""The processes in which `bench memory` trains: they stay for all rows, and end when one fails.

CUDA, libraries and compiled kernels are loaded once. A rank that runs out of memory leaves the
others in a collective that it will never join, so after a failure all of them are killed, and the
next row finds new ones.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from ppruntime.config import Config
from ppruntime.ledger import UPDATE, predict
from ppruntime.memory_record import OpMemory

_GRACE_SECONDS = 3.0
"""For the other ranks to fail too, once one has."""
_START_SECONDS = 180.0


class WorkersLost(RuntimeError):
    """A rank failed, died or gave no answer; the text says which and why. All are gone."""


@dataclass(frozen=True, slots=True)
class Training:
    """What the ranks of a layout are asked to train."""

    name: str
    number: int
    """Of the row: its stores' names begin with it."""
    pp: int
    dp: int
    files: tuple[str, ...]
    overrides: tuple[str, ...]
    num_steps: int
    """Timed ones; one comes before them."""
    draw_on_device: bool


@dataclass(frozen=True, slots=True)
class _Join:
    pp: int
    dp: int
    port: int
    use_cuda: bool


class Workers:
    """`num_ranks` processes, a GPU each. `end` them whatever happens; a call that raises has."""

    def __init__(self, num_ranks: int, *, use_cuda: bool) -> None:
        self._stores: list[Any] = []  # which torch leaves untyped; they stay: one may ask once more
        self._use_cuda = use_cuda
        self._joined: tuple[int, int] | None = None
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            self._start(num_ranks)
        except BaseException:  # they hear no signal but a kill
            self.end()
            raise
        self.machine: dict[str, Any] = self._ask("hello", range(num_ranks), _START_SECONDS)[0]
        """Device, its bytes, and versions."""

    def _start(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(num_ranks):
            pipe, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(child_end, rank, self._use_cuda), daemon=True
            )
            self._processes.append(process)
            self._pipes.append(pipe)
            process.start()
            child_end.close()

    def copies(self, seconds: float) -> dict[str, float]:
        """`copy_rates` of the first rank's device."""
        rates: dict[str, float] = self._ask("copies", range(1), seconds)[0]
        return rates

    def train(self, training: Training, seconds: float) -> list[dict[str, Any]]:
        """What every rank found. Raises WorkersLost if a rank fails, or is not there in time."""
        sizes = training.pp, training.dp
        members = range(training.pp * training.dp)
        deadline = time.monotonic() + seconds
        if self._joined != sizes:
            if self._joined is not None:
                left = self._joined[0] * self._joined[1]
                self._ask("leave", range(left), deadline - time.monotonic())
            self._stores.append(_open_store())  # a world has a store of its own
            join = _Join(*sizes, self._stores[-1].port, self._use_cuda)
            self._ask(join, members, deadline - time.monotonic())
            self._joined = sizes
        return self._ask(training, members, deadline - time.monotonic())

    def end(self) -> None:
        """Kills the processes."""
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()

    def _ask(self, what: object, members: Sequence[int], seconds: float) -> list[Any]:
        try:
            for rank in members:
                self._pipes[rank].send(what)
            return self._answers(members, time.monotonic() + seconds)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise WorkersLost(f"a rank ended before it was asked: {error}") from error
            raise

    def _answers(self, members: Sequence[int], deadline: float) -> list[Any]:
        found: dict[int, Any] = {}
        failed: dict[int, str] = {}
        while waiting := {self._pipes[r]: r for r in members if r not in found | failed}:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    is_done, answer = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    is_done, answer = False, f"it died, exit code {self._processes[rank].exitcode}"
                if is_done:
                    found[rank] = answer
                else:
                    failed[rank] = answer
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        late = [rank for rank in members if rank not in found | failed]
        if failed:
            told = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items()))
            raise WorkersLost(told + (f"\nranks {late} were waiting" if late else ""))
        if late:
            raise WorkersLost(f"ranks {late} gave no answer in time")
        return [found[rank] for rank in members]


def _open_store() -> Any:
    from torch._C._distributed_c10d import TCPStore  # torch is not loaded at import

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _serve(pipe: Connection, rank: int, use_cuda: bool) -> None:
    """The process of one rank: answers until the pipe closes."""
    for told in (signal.SIGTERM, signal.SIGINT):  # who started it hears them, and kills it
        signal.signal(told, signal.SIG_IGN)
    faulthandler.enable()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    worker = _Worker(rank, use_cuda)
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, worker.answer(asked)
        except Exception as error:  # out of memory is an answer too
            traceback.print_exc()
            answer = False, f"{type(error).__name__}: {error}"
        pipe.send(answer)


class _Worker:
    """One rank: its process group, and what it trains in it."""

    def __init__(self, rank: int, use_cuda: bool) -> None:
        import torch

        self._rank = rank
        self._device = torch.device("cuda", rank) if use_cuda else torch.device("cpu")
        if use_cuda:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)
        self._ranks: Any = None  # Ranks, once it has joined; torch is not loaded at import

    def answer(self, asked: object) -> Any:
        from ppruntime.launch.copy_rates import copy_rates
        from ppruntime.ranks import leave

        match asked:
            case Training():
                return self._train(asked)
            case _Join():
                return self._join(asked)
            case "hello":
                return self._machine()
            case "copies":
                return copy_rates(self._device)
            case "leave":
                self._cleared()
                leave()
                self._ranks = None
        return None

    def _machine(self) -> dict[str, Any]:
        import torch

        on_gpu = self._device.type == "cuda"
        versions = {"torch": str(torch.__version__)}
        if on_gpu:
            import triton

            versions["triton"] = triton.__version__
        return {
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "device_bytes": torch.cuda.mem_get_info()[1] if on_gpu else None,
            "versions": versions,
        }

    def _join(self, asked: _Join) -> None:
        from ppruntime.ranks import Layout, join

        world = str(asked.pp * asked.dp)
        os.environ |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ["MASTER_PORT"] = str(asked.port)
        layout = Layout(asked.pp, asked.dp, 1)
        self._ranks = join(layout, use_cuda=asked.use_cuda, timeout_seconds=300)

    def _train(self, asked: Training) -> dict[str, Any]:
        from ppruntime.build import build_pipeline
        from ppruntime.config import load

        config = load(list(asked.files), list(asked.overrides))
        ranks = replace(self._ranks, store_prefix=f"row {asked.number} ")
        left_over = self._cleared()
        pipeline = build_pipeline(config, ranks, draw_on_device=asked.draw_on_device)
        found = self._steps(config, ranks, pipeline, asked.num_steps)
        # Not where a step failed: the other ranks may never come, and all are about to be killed.
        pipeline.transport.close()
        return found | {
            "rank": self._rank,
            "pp_rank": ranks.pp_rank,
            "left_over_bytes": left_over,
            "host_bytes": pipeline.host_pool.num_bytes,
            "notes": list(pipeline.notes),
        }

    def _cleared(self) -> int | None:
        """Bytes that earlier rows left on the device."""
        import torch

        gc.collect()
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        num_bytes: int = torch.cuda.memory_allocated()
        return num_bytes

    def _steps(self, config: Any, ranks: Any, pipeline: Any, num_steps: int) -> dict[str, Any]:
        import torch

        from ppruntime.data.batches import open_data
        from ppruntime.memory_meter import MemoryMeter
        from ppruntime.sleep_rig import start_together
        from ppruntime.trainer import Trainer

        trainer, data = Trainer(config, ranks, pipeline), open_data(config)
        meter = MemoryMeter(trainer, rank=ranks.pp_rank, device=ranks.device)
        seconds, losses, norms, memories = [], [], [], []
        outside = None
        for step in range(num_steps + 1):
            watch = meter.watch() if step == num_steps else None
            meter.start()
            start_together()
            start = time.perf_counter()
            if watch is None:
                result = trainer.step(step, data)
            else:
                with watch:
                    result = trainer.step(step, data, watch)
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            memories.append(meter.read(watch))
        assert watch is not None, "the last step is watched"
        timed = [m for m in memories[1:] if m.peak_bytes is not None]
        peak = max((m.peak_bytes for m in timed if m.peak_bytes is not None), default=None)
        reserved = max((m.reserved_bytes or 0 for m in timed), default=0) or None
        if ranks.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            outside = total - free - torch.cuda.memory_reserved()
        return {
            "seconds": seconds,
            "losses": losses,
            "grad_norms": norms,
            "peak_bytes": peak,
            "peak_op": max(watch.ops, key=lambda op: op.peak_bytes).op,
            "reserved_bytes": reserved,
            "slack_bytes": reserved - peak if reserved and peak else 0,
            "outside_bytes": outside,
            "resting_parameters": memories[-1].resting_parameters,
            "optimizer": memories[-1].optimizer,
            "ops": _beside_the_ledger(config, ranks.pp_rank, watch.ops),
        }


def _beside_the_ledger(config: Config, pp_rank: int, measured: Sequence[OpMemory]) -> list[str]:
    """A line per computation of the last step, and one of the update: where a plan that is off
    goes wrong."""
    ledger = predict(config)[pp_rank]
    planned = {moment.op: ledger.through_the_step + moment.total for moment in ledger.moments}
    return [
        f"{op.op}: live {op.live_bytes / 1e9:.3f}, peak {op.peak_bytes / 1e9:.3f} GB"
        + (f", planned {planned[op.op] / 1e9:.3f}" if op.op in planned else "")
        for op in measured
        if op.op in planned or op.op == UPDATE
    ]
