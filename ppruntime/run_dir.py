"""A run's directory: a history that is only ever added to, used by one run at a time.

    runs/tiny-01/
        run.json              marks the directory as ours, written once
        config-01.toml        resolved configuration, one a start
        metrics.jsonl         one line a step, appended
        ckpt/step-00000010/   committed checkpoints (checkpoint.py)
        tensorboard/          events, if the package is there
        status.json           how it stands or how it ended; replaced
        timeline.svg          ops of one step of the last start; replaced, like trace.json
        memory.svg            memory over that step, if it was watched; numbers in memory.json
        lock                  who uses it now

Rank 0 opens the directory; the other ranks are told its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from types import TracebackType

import msgspec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FORMAT_VERSION = 1


class RunDirError(ValueError):
    """The run directory cannot be used: says which, why and what to do."""


class ExitCode(IntEnum):
    """How a run ended. torchrun turns every failure into 1, so status.json has it too."""

    DONE = 0
    CONFIG = 2
    ENVIRONMENT = 3
    RANK_DIED = 10
    TIMEOUT = 11
    NONFINITE = 12
    CHECKPOINT = 13
    STORAGE = 14
    OUT_OF_MEMORY = 15
    DATA = 16
    DISAGREEMENT = 17
    DIVERGED = 20
    STOPPED = 75
    """Stopped on request; the run can go on from its last checkpoint."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Status:
    """How a run stands."""

    exit: int | None
    """The exit code; None while it runs, or if it was killed."""
    reason: str
    """One sentence: "running", "done", or the error."""
    step: int
    """Steps done."""
    last_checkpoint: str | None
    """Name of the newest committed checkpoint, such as step-00000010; None before the first."""
    resumable: bool
    """Whether starting it again with the same directory goes on."""
    culprit_rank: int | None = None
    """The rank that failed first, where that is known."""


@dataclass(frozen=True, slots=True)
class _Owner:
    """What a lock file says of its holder."""

    pid: int
    host: str
    since: str


@dataclass(frozen=True, slots=True)
class _Marker:
    """run.json."""

    format_version: int
    name: str
    created: str


class RunDir:
    """An open run directory, locked until `close`. A context manager."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @property
    def checkpoints(self) -> Path:
        return self.path / "ckpt"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def timeline(self) -> Path:
        return self.path / "timeline.svg"

    @property
    def memory(self) -> Path:
        return self.path / "memory.json"

    @property
    def memory_picture(self) -> Path:
        return self.path / "memory.svg"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    def add_config(self, text: str) -> Path:
        """Stores this start's resolved configuration under the next free number; gives its path."""
        for number in range(1, 10_000):
            path = self.path / f"config-{number:02d}.toml"
            with contextlib.suppress(FileExistsError):
                _write(path, text.encode(), os.O_EXCL)
                return path
        raise RunDirError(f"{self.path} holds 9,999 configurations; use a new directory")

    def write_status(self, status: Status) -> None:
        """Replaces status.json as a whole: a reader sees the old one or the new one."""
        new = self.path / ".status.json.new"
        _write(new, msgspec.json.format(msgspec.json.encode(status)) + b"\n", os.O_TRUNC)
        new.rename(self.path / "status.json")

    def read_status(self) -> Status | None:
        """What the last start left behind; None if there was none, or none that can be read."""
        return read_status(self.path)

    def close(self) -> None:
        """Gives the directory free for the next start. Idempotent."""
        if self._lock >= 0:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def new_run_dir(root: Path, name: str) -> Path:
    """Makes `root/NAME-NN` with the smallest number above all that are there, and gives its path.

    Two starts at once get two directories. Raises RunDirError for a name that is no plain name, and
    where nothing can be written.
    """
    check_name(name)
    with _as_run_dir_error(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        pattern = re.compile(rf"{re.escape(name)}-(\d{{2,}})")
        taken = (pattern.fullmatch(entry.name) for entry in root.iterdir())
        number = max((int(match[1]) for match in taken if match), default=0)
        while True:
            number += 1
            path = root / f"{name}-{number:02d}"
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                return path


def open_run(path: Path) -> RunDir:
    """Opens a run directory that the user named, makes it if need be, and locks it.

    Raises RunDirError for a link, for a directory with files that are no run's, while another
    process uses it, and where nothing can be written. A lock of a process that died is taken over.
    """
    if path.is_symlink():
        raise RunDirError(f"{path} is a link; name the directory itself as run.dir")
    check_name(path.name)
    with _as_run_dir_error(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker = path / "run.json"
        if not marker.exists():
            _refuse_strangers(path)
        lock = _take_lock(path)
        if not marker.exists():
            content = msgspec.json.encode(_Marker(_FORMAT_VERSION, path.name, _now()))
            _write(marker, content + b"\n", os.O_TRUNC)
        return RunDir(path, lock)


def _refuse_strangers(path: Path) -> None:
    strangers = sorted(entry.name for entry in path.iterdir() if entry.name != "lock")
    if strangers:
        raise RunDirError(
            f"{path} is not a run directory and holds {strangers[0]}; name an empty or new one"
        )


@contextlib.contextmanager
def _as_run_dir_error(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirError(
            f"{error.filename or path} cannot be used: {error.strerror}; set run.dir to a directory"
            " that can be written"
        ) from error


def read_status(path: Path) -> Status | None:
    """The status of the run in `path`, which may be in use; None if there is none to read."""
    try:
        return msgspec.json.decode((path / "status.json").read_bytes(), type=Status)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def check_name(name: str) -> None:
    """Raises RunDirError unless `name` is a plain name: no separators, no leading dot, short."""
    if not _NAME.fullmatch(name):
        raise RunDirError(
            f"{name!r} cannot name a run; use 1 to 64 letters, digits and . _ -,"
            " the first a letter or digit"
        )


def _take_lock(path: Path) -> int:
    # The kernel's lock says whether the owner lives; the text says who that is. A kernel lock goes
    # with its process, so there is nothing stale on one host; across hosts the text decides.
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        owner = _owner(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = f"by pid {owner.pid} on {owner.host} since {owner.since}" if owner else "already"
            raise RunDirError(
                f"{path} is in use {who}; wait for that run to end or use another directory"
            ) from None
        if owner is not None and owner.host != socket.gethostname():
            raise RunDirError(
                f"{path} was in use by pid {owner.pid} on {owner.host} since {owner.since}, which"
                f" cannot be looked up from here; if that run is gone, delete {path / 'lock'}"
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(_Owner(os.getpid(), socket.gethostname(), _now())), 0)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _owner(lock: int) -> _Owner | None:
    try:
        return msgspec.json.decode(os.pread(lock, 4096, 0), type=_Owner)
    except msgspec.MsgspecError:
        return None


def _write(path: Path, content: bytes, flag: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
