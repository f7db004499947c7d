"""Runs a test's function once per rank, each in a process of its own, and collects what came of it.

The processes are forked from a server that has torch loaded (20 ms a process instead of 2 s) and no
threads, unlike the test process. `torch.distributed.init_process_group("gloo")` works in them as
under torchrun: rank, world size and a store are in the environment. The store lives in the test
process, so it outlives every rank that a test kills, and its port is chosen by the system.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "ppruntime.session",
]
"""What ranks use: loaded once, in the server, and not once a rank."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one rank: `value`, or the `error` that it raised, or neither if it died.

    `error_text` is the traceback, for a dead or killed rank what is known of its end. `exit_code`
    is the process's, negative for a signal. `seconds` runs from the start of all to this result.
    """

    value: Any
    error: BaseException | None
    error_text: str | None
    exit_code: int | None
    seconds: float


class RanksFailed(AssertionError):
    """At least one rank raised, died or was too late; the text has every rank's traceback."""


def run_ranks(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120
) -> list[Any]:
    """Runs `function(rank, *args)` on every rank; the results in rank order.

    `function` is at module level of a test file; arguments and results are what pickle takes
    (tensors by value). Raises RanksFailed with all tracebacks when a rank raises, dies or is not
    done in time (then with the stack in which it hung); no process is left behind.
    """
    outcomes = rank_outcomes(num_ranks, function, *args, timeout_seconds=timeout_seconds)
    failures = [
        f"--- rank {rank} of {num_ranks} ---\n{outcome.error_text}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error_text is not None
    ]
    if failures:
        raise RanksFailed("\n".join(failures))
    return [outcome.value for outcome in outcomes]


def rank_outcomes(
    num_ranks: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120
) -> list[Outcome]:
    """As `run_ranks`, for tests of faults: what came of each rank, whatever it is."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    module = sys.modules[function.__module__]
    call = (function.__module__, module.__file__, function.__qualname__, pickle.dumps(args))
    ranks: list[_Rank] = []
    start = time.monotonic()
    try:
        ranks.extend(_Rank(rank, num_ranks, store.port, call) for rank in range(num_ranks))
        deadline = start + timeout_seconds
        waiting = {rank.result: rank for rank in ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(waiting), left):
                waiting.pop(ready).collect(start)
        for rank in waiting.values():
            rank.dump_stack()
        return [rank.outcome(start, timeout_seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


class _Rank:
    """One process, its pipe and the file that its stack is written to when it hangs."""

    def __init__(self, rank: int, num_ranks: int, port: int, call: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.result, child_end = context.Pipe(duplex=False)
        self.stack = tempfile.NamedTemporaryFile(mode="r", suffix=f".rank{rank}")  # noqa: SIM115
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # The store is the test's: every rank is a client of it.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        self.process = context.Process(
            target=_main, args=(child_end, self.stack.name, environment, call), name=f"rank {rank}"
        )
        self.process.start()
        child_end.close()
        self._outcome: Outcome | None = None

    def collect(self, start: float) -> None:
        """Takes the result that has come, or notes that the process ended without one."""
        seconds = time.monotonic() - start
        try:
            value, error, error_text = pickle.loads(self.result.recv_bytes())  # noqa: S301 (our own)
        except EOFError:
            self.process.join(5)
            code = self.process.exitcode
            text = f"the process ended without a result, exit code {code}\n{self._stack_text()}"
            self._outcome = Outcome(None, None, text, code, seconds)
        else:
            self.process.join(5)  # closing a process group takes a moment
            self._outcome = Outcome(value, error, error_text, self.process.exitcode, seconds)

    def dump_stack(self) -> None:
        """Has a hanging process write the stacks of its threads."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGUSR1)

    def outcome(self, start: float, timeout_seconds: float) -> Outcome:
        if self._outcome is not None:
            return self._outcome
        text = self._settled_stack()
        text = f"no result after {timeout_seconds} s; it was here:\n{text}"
        return Outcome(None, None, text, None, time.monotonic() - start)

    def kill(self) -> None:
        """Ends the process if it still runs, and gives everything back. Idempotent."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.result.close()
        self.stack.close()

    def _settled_stack(self) -> str:
        # The process writes while this one reads, and on a busy machine line by line: the stacks
        # are whole once `_main`, at the bottom of one, is there and nothing follows.
        deadline = time.monotonic() + 20
        text = ""
        while time.monotonic() < deadline:
            before, text = text, self._stack_text()
            if " in _main\n" in text and text == before:
                break
            time.sleep(0.2)
        return text

    def _stack_text(self) -> str:
        self.stack.seek(0)
        return self.stack.read()


def make_warnings_errors() -> None:
    """As pytest does by the project's `filterwarnings`, in a process that pytest does not know."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    first, *others = project["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert first == "error", first
    warnings.simplefilter("error")
    for line in others:
        action, message, category = line.split(":")
        warnings.filterwarnings(action, message, getattr(builtins, category))


def _main(
    result: multiprocessing.connection.Connection,
    stack_path: str,
    environment: dict[str, str],
    call: tuple[str, str, str, bytes],
) -> None:
    """The process of one rank: imports the test file, calls the function, sends what came of it."""
    os.environ.update(environment)
    stack = open(stack_path, "w")  # noqa: SIM115 (open as long as the process lives)
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    import torch

    torch.set_num_threads(1)
    make_warnings_errors()
    try:
        function, args = _resolve(call)
        outcome = (function(int(environment["RANK"]), *args), None, None)
        payload = pickle.dumps(outcome)
    except BaseException as error:  # whatever it is, the test process gets to see it
        payload = _pickled_error(error)
    result.send_bytes(payload)
    result.close()
    _leave(stack)


def _resolve(call: tuple[str, str, str, bytes]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    # By path: pytest gives test files names that need not be importable here.
    name, path, qualified_name, pickled_args = call
    if name not in sys.modules:
        sys.path[:0] = [str(Path(__file__).parent.parent)]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return getattr(sys.modules[name], qualified_name), pickle.loads(pickled_args)  # noqa: S301


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        payload = pickle.dumps((None, error, text))
        pickle.loads(payload)  # noqa: S301 (an error with a constructor of its own may not come back)
    except Exception:
        payload = pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text))
    return payload


def _leave(stack: IO[str]) -> None:
    # Ends without interpreter teardown: a process group whose peers are dead may not close.
    sys.stdout.flush()
    sys.stderr.flush()
    stack.flush()
    os._exit(0)
