"""Checkpoints: a committed directory is complete and verified, or it is not loaded.

    ckpt/step-00000010/
        shard-00001-model-00001-of-00001.safetensors   what rank 0 wrote
        state.json      step, data cursor, layout, versions (`TrainingState`)
        manifest.json   size and sha256 of each file (`Manifest`); its presence is the commit

Tensors are keyed by the model's full parameter names, so any other cut, placement or number of
ranks can load them: each rank asks for the names it holds. Sharded (FSDP2) tensors are stored as
shards and are put together or cut anew while loading. The bytes are moved by torch's distributed
checkpoint with its safetensors storage; nothing in a checkpoint is ever unpickled. (While a save
is planned, torch sends lists of names and shapes between the ranks of the job as pickles.)

No random state is stored, for training draws nothing: there is no dropout, initial weights depend
on (seed, name), and the data order on (seed, cursor).

A save writes to a temporary directory, flushes it to the disk, and renames it: whenever it dies,
the newest committed checkpoint is the old or the new one. Older ones go only after that.
"""

from __future__ import annotations

import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ppruntime.manifest import (
    FORMAT_VERSION,
    CheckpointError,
    FileEntry,
    Manifest,
    TrainingState,
    Verify,
    check_files,
    commit,
    find,
    flushed_entry,
)
from ppruntime.messages import broadcast_bytes, collective_device, first_complaint, gather_bytes

_SPARE = 1.1
"""Free space a save wants, as a multiple of its tensors' bytes."""

_FILE_BYTES = 4 << 30
"""Tensors of one file, about: a file is put together in host memory before it is written."""

T = TypeVar("T")


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    state: TrainingState,
    *,
    group: dist.ProcessGroup | None,
    keep_last: int = 3,
) -> Path:
    """Writes and commits `folder/step-N`, deletes all but the newest `keep_last`, gives its path.

    `tensors` are this rank's, by full name; a name on several ranks is stored once, a DTensor as
    its shards. They must not change until this returns. A collective of `group`, whose ranks all
    see `folder`; None: this process saves alone.

    Raises CheckpointError on every rank, with the folder as it was, if a rank fails, the disk has
    too little room, or the step was saved before.
    """
    if keep_last < 2:
        raise ValueError(f"keep_last is {keep_last}; keep at least 2, so that one is always whole")
    rank, num_ranks = _place(group)
    target = folder / f"step-{state.step:08d}"
    name = f".tmp-step-{state.step}-{uuid.uuid4().hex[:12]}"
    temporary = folder / broadcast_bytes(name.encode(), group).decode()
    try:
        _on_first_rank(lambda: _begin(target, temporary), group)
        _together(lambda: _check_shared(temporary, rank), group)
        names = _together(lambda: _write_tensors(temporary, tensors, group), group)
        mine = _together(lambda: [flushed_entry(temporary / name) for name in names], group)
        entries = _gather_entries(mine, group)
        manifest = Manifest(FORMAT_VERSION, state.step, num_ranks, str(torch.__version__), entries)
        _on_first_rank(lambda: commit(temporary, target, manifest, state), group)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if rank == 0:
        _prune(folder, keep_last)
    return target


def load(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None,
    verify: Verify = "full",
    residual_type: str = "mhc",
) -> TrainingState:
    """Fills this rank's tensors, in place, from a committed checkpoint of any layout, written by a
    model of the same `residual_type`.

    A collective of `group`; together its ranks have to ask for all that the checkpoint holds.
    Before a tensor is touched the files are compared with the manifest ("full": sizes and sha256,
    each file by one rank; "sizes"; "off") and names, shapes and dtypes with this rank's tensors.
    Raises CheckpointError, the same on every rank, for anything that differs.
    """
    rank, num_ranks = _place(group)
    state = _together(
        lambda: check_files(path, verify=verify, part=rank, num_parts=num_ranks), group
    )
    _together(lambda: _check_residual(path, state, residual_type), group)
    metadata = _together(lambda: _read_metadata(path), group)
    unclaimed = _unclaimed(metadata, tensors, group)
    _together(lambda: _check_match(path, metadata, tensors, unclaimed), group)
    _together(lambda: _read_tensors(path, tensors), group)
    return state


# --- saving --------------------------------------------------------------------------------------


class _Writer(HuggingFaceStorageWriter):
    """Each rank writes its tensors to files of its own; remembers the names of those it wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), save_distributed=True)
        self.written: tuple[str, ...] = ()

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans = super().prepare_global_plan(plans)
        for plan in plans:
            plan.storage_data["fqn_to_index_mapping"] = _file_of_each(plan)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        self.written = tuple(sorted({r.storage_data.relative_path for r in results.value()}))
        return results


def _file_of_each(plan: SavePlan) -> dict[str, int]:
    """Tensors in order, to files numbered from 1: the next one begins where one is full."""
    files: dict[str, int] = {}
    total = 0
    for item in plan.items:
        files[item.index.fqn] = 1 + total // _FILE_BYTES
        if item.tensor_data is not None:
            itemsize = item.tensor_data.properties.dtype.itemsize
            total += item.tensor_data.chunk.sizes.numel() * itemsize
    return files


class _Planner(DefaultSavePlanner):
    """Refuses a save for which the disk has too little room, before anything is written."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        wanted = _SPARE * sum(
            item.size.numel() * item.properties.dtype.itemsize
            for item in metadata.state_dict_metadata.values()
            if isinstance(item, TensorStorageMetadata)
        )
        free = shutil.disk_usage(self._folder).free
        if free < wanted:
            raise CheckpointError(
                f"it needs {wanted / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free on"
                f" {self._folder.parent}; free some or lower checkpoint.keep_last"
            )
        return plans, metadata


def _begin(target: Path, temporary: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if target.exists():
        raise CheckpointError(f"{target} is there already; a run saves a step once")
    temporary.mkdir(mode=0o700)


def _check_shared(temporary: Path, rank: int) -> None:
    if not temporary.is_dir():
        raise CheckpointError(
            f"{temporary.parent} of rank 0 is not there on rank {rank}; put the run directory on a"
            " file system that all hosts share"
        )


def _write_tensors(
    temporary: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> tuple[str, ...]:
    """Writes this rank's share; gives the names of its files."""
    writer = _Writer(temporary)
    with _no_dist_warning():
        save_tensors(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
            storage_writer=writer,
            planner=_Planner(temporary),
            process_group=group,
            no_dist=group is None,
        )
    return writer.written


def _gather_entries(
    mine: list[FileEntry], group: dist.ProcessGroup | None
) -> tuple[FileEntry, ...]:
    parts = gather_bytes(msgspec.json.encode(mine), group)
    entries = (e for part in parts for e in msgspec.json.decode(part, type=list[FileEntry]))
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _prune(folder: Path, keep_last: int) -> None:
    """Deletes what is too old. Renamed first, so that no half-deleted one looks committed."""
    try:
        for path in find(folder).committed[:-keep_last]:
            path.rename(folder / f".old-{path.name}-{uuid.uuid4().hex[:12]}")
        for path in folder.glob(".old-*"):
            shutil.rmtree(path)
    except OSError as error:  # the new one is safe, and the next save tries again
        warnings.warn(f"an old checkpoint was not deleted: {error}", RuntimeWarning, stacklevel=3)


# --- loading -------------------------------------------------------------------------------------


def _read_metadata(path: Path) -> dict[str, TensorStorageMetadata]:
    """Shape, dtype and chunks of every tensor, from the headers of all files."""
    metadata: Metadata = HuggingFaceStorageReader(str(path)).read_metadata()
    return {
        name: tensor
        for name, tensor in metadata.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


def _unclaimed(
    metadata: Mapping[str, TensorStorageMetadata],
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> list[str]:
    """Names in the checkpoint that no rank asks for."""
    names = sorted(metadata)
    claimed = torch.tensor([name in tensors for name in names], dtype=torch.uint8)
    if group is not None:
        claimed = claimed.to(collective_device(group))
        dist.all_reduce(claimed, op=dist.ReduceOp.MAX, group=group)
    return [name for name, mark in zip(names, claimed.tolist(), strict=True) if not mark]


def _check_residual(path: Path, state: TrainingState, residual_type: str) -> None:
    if state.residual_type != residual_type:
        raise CheckpointError(
            f'{path} was written with model.residual_type = "{state.residual_type}", this model'
            f' has "{residual_type}", whose parameters are others; go on with'
            f' "{state.residual_type}", or start a new run'
        )


def _check_match(
    path: Path,
    metadata: Mapping[str, TensorStorageMetadata],
    tensors: Mapping[str, Tensor],
    unclaimed: list[str],
) -> None:
    complaints = []
    if unclaimed:
        complaints.append(f"only the checkpoint has {_listed(unclaimed)}")
    if missing := [name for name in tensors if name not in metadata]:
        complaints.append(f"only this model has {_listed(missing)}")
    for name, tensor in tensors.items():
        if (stored := metadata.get(name)) is None:
            continue
        there = f"{list(stored.size)} {stored.properties.dtype}"
        here = f"{list(tensor.shape)} {tensor.dtype}"
        if there != here:
            complaints.append(f"{name} is {there} there and {here} here")
        elif sum(chunk.sizes.numel() for chunk in stored.chunks) != stored.size.numel():
            complaints.append(f"{name} is not whole there")
    if complaints:
        more = f"; {len(complaints) - 6} more differences" if len(complaints) > 6 else ""
        raise CheckpointError(
            f"{path} holds another model: {'; '.join(complaints[:6])}{more}; load it with the"
            " configuration that wrote it"
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def _read_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    # Every rank reads its own: there is nothing to agree on, so no collective.
    with _no_dist_warning():
        load_tensors(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=HuggingFaceStorageReader(str(path)),
            no_dist=True,
        )


# --- all ranks alike -----------------------------------------------------------------------------


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(rank, number of ranks) in the group."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _together(act: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Does it on every rank; if it fails on one, all raise that one's complaint."""
    failure: BaseException | None = None
    complaint: str | None = None
    result: T | None = None
    try:
        result = act()
    except (Exception, CheckpointException) as error:  # torch's derives from BaseException
        failure, complaint = error, _sentence(error, _place(group)[0])
    complaint = first_complaint(complaint, group)
    if complaint is not None:
        raise CheckpointError(complaint) from failure
    return cast(T, result)


def _on_first_rank(act: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Does it on rank 0; if it fails, all ranks raise."""
    _together(act if _place(group)[0] == 0 else lambda: None, group)


def _sentence(error: BaseException, rank: int) -> str:
    """The error in one line, with the rank it happened on; of torch's report the lowest rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        return _sentence(error.failures[rank][0], rank)
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        return f"rank {rank}: {error.strerror}{where}"
    return f"rank {rank}: {type(error).__name__}: {error}"


@contextmanager
def _no_dist_warning() -> Iterator[None]:
    """Torch warns that one process saves or loads alone; here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
