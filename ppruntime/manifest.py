"""What makes a checkpoint one: its manifest, and whether the files are still those it lists.

Knows files and digests, no tensors: it works where torch is not loaded.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

FORMAT_VERSION = 1
_COMMITTED = re.compile(r"step-(\d{8,})")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REMEDY = "restore it or load an older checkpoint"

Verify = Literal["full", "sizes", "off"]
"""What is compared before a checkpoint is loaded: sizes and sha256, sizes, nothing."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or is not what it should be; all ranks raise it alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """state.json: what a run needs beside tensors to go on."""

    step: int
    """Steps done."""
    data_cursor: int
    """Sequences read since the run's beginning, over all data ranks."""
    tokens: int
    """Tokens trained on since the run's beginning."""
    config_digest: str
    """Digest of the resolved configuration that wrote it."""
    skipped: int = 0
    """Steps of the run whose update was skipped, see `fault.nonfinite`."""
    skipped_in_a_row: int = 0
    """Of these, those up to the last step; 0 if that was updated."""
    layout: str
    """Words on pipeline size, cut and data ranks, for people; any other layout can load it."""
    residual_type: str = "mhc"
    """The model's; earlier checkpoints, which do not say, have mhc."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint, as it lay on the disk before the commit."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """manifest.json. `digest` is the sha256 of this record's JSON with an empty digest."""

    format_version: int
    step: int
    num_ranks: int
    torch_version: str
    files: tuple[FileEntry, ...]
    digest: str = ""

    def seal(self) -> Manifest:
        """The manifest with its digest."""
        content = msgspec.json.encode(replace(self, digest=""))
        return replace(self, digest=hashlib.sha256(content).hexdigest())


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in a folder of checkpoints."""

    committed: tuple[Path, ...]
    """Ascending by step. Their content is verified when it is loaded, not here."""
    incomplete: tuple[Path, ...]
    """What saves that died left behind; never loaded and never deleted here."""

    @property
    def latest(self) -> Path | None:
        return self.committed[-1] if self.committed else None


def find(folder: Path) -> Found:
    """The checkpoints in `folder` (which need not exist), by what is there and nothing else."""
    committed, incomplete = [], []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _COMMITTED.fullmatch(entry.name)
        if match and not entry.is_symlink() and (entry / "manifest.json").is_file():
            committed.append((int(match[1]), entry))
        elif match or entry.name.startswith(".tmp-"):
            incomplete.append(entry)
    return Found(tuple(path for _, path in sorted(committed)), tuple(sorted(incomplete)))


def flushed_entry(file: Path) -> FileEntry:
    """Flushes a file to the disk, closes it to others, and says what is in it."""
    with file.open("rb") as stream:
        os.fchmod(stream.fileno(), 0o600)
        os.fsync(stream.fileno())
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(file.name, stream.tell(), digest)


def commit(temporary: Path, target: Path, manifest: Manifest, state: TrainingState) -> None:
    """Completes a temporary directory with state.json and manifest and gives it its name.

    `manifest` lists the files of tensors. All is flushed to the disk before the rename, which is
    the commit, and the rename is flushed too.
    """
    _write_json(temporary / "state.json", msgspec.json.encode(state))
    files = (*manifest.files, flushed_entry(temporary / "state.json"))
    sealed = replace(manifest, files=files).seal()
    _write_json(temporary / "manifest.json", msgspec.json.encode(sealed))
    _flush_folder(temporary)
    temporary.rename(target)
    _flush_folder(target.parent)


def _write_json(file: Path, content: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(msgspec.json.format(content) + b"\n")
        stream.flush()
        os.fsync(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: Path) -> Manifest:
    """The manifest. Raises CheckpointError if it is damaged or of another format."""
    file = path / "manifest.json"
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: the checkpoint was never completed") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; {_REMEDY}") from None
    if manifest.format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format {manifest.format_version}, this version reads {FORMAT_VERSION}"
        )
    sealed = manifest.seal()
    if sealed.digest != manifest.digest:
        raise CheckpointError(f"{file} {_differs(manifest.digest, sealed.digest)}; {_REMEDY}")
    for entry in manifest.files:
        if not _PLAIN_NAME.fullmatch(entry.name):
            raise CheckpointError(f"{file} names {entry.name!r}, which is no plain file name")
    return manifest


def check_files(
    path: Path, *, verify: Verify = "full", part: int = 0, num_parts: int = 1
) -> TrainingState:
    """Compares a checkpoint's files with its manifest and gives its state.

    Every file's presence and size are looked at; of "full"'s digests those of every `num_parts`-th
    file, from number `part` on, so that ranks can share the work. Raises CheckpointError with the
    first file that differs, what was wanted and what was found.
    """
    manifest = read_manifest(path)
    if verify != "off":
        _refuse_strays(path, manifest)
        complaints: list[str] = []
        for i, entry in enumerate(manifest.files):
            hashed = verify == "full" and i % num_parts == part
            complaints += _complaints(path / entry.name, entry, hashed=hashed)
        if complaints:
            raise CheckpointError(f"{complaints[0]}; {_REMEDY}")
    return _decode_state(path)


def read_state(path: Path) -> TrainingState:
    """The state alone, after a look at the manifest and at state.json's digest."""
    entries = (entry for entry in read_manifest(path).files if entry.name == "state.json")
    for entry in entries:
        if complaints := _complaints(path / entry.name, entry, hashed=True):
            raise CheckpointError(f"{complaints[0]}; {_REMEDY}")
    return _decode_state(path)


def _decode_state(path: Path) -> TrainingState:
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=TrainingState)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path / 'state.json'} cannot be read: {error}; {_REMEDY}") from None
    if path.name != f"step-{state.step:08d}":
        raise CheckpointError(f"{path} holds step {state.step}; give it its own name back")
    return state


def _refuse_strays(path: Path, manifest: Manifest) -> None:
    # The reader takes all safetensors files that it finds: one too many is another tensor.
    known = {"manifest.json", *(entry.name for entry in manifest.files)}
    for file in sorted(path.iterdir()):
        if file.name not in known:
            raise CheckpointError(f"{file} is not in the manifest; move it out of the checkpoint")


def _complaints(file: Path, entry: FileEntry, *, hashed: bool) -> list[str]:
    try:
        num_bytes = file.stat().st_size
    except FileNotFoundError:
        return [f"{file} is missing, {entry.num_bytes} bytes"]
    if num_bytes != entry.num_bytes:
        return [f"{file} has {num_bytes} bytes, the manifest says {entry.num_bytes}"]
    if not hashed:
        return []
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return [] if digest == entry.sha256 else [f"{file} {_differs(entry.sha256, digest)}"]


def _differs(wanted: str, found: str) -> str:
    return f"is damaged: its sha256 is {found[:12]}..., the manifest says {wanted[:12]}..."
