"""Who this process is: the environment's rank -> its place on the axes pp, dp, ep, and its groups.

The only module that reads the launcher's environment.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from ppruntime.config.errors import ConfigError
from ppruntime.transports.lives import Life, life_of, parse_life

_POLL_SECONDS = 0.05
_LOST_KEY, _PARTED_KEY = "lost", "parted"
_LET_GO_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the axes. Ranks of one pipeline lie `dp * ep` apart, so that the expert group of a
    stage, which talks most, gets neighbouring ranks: those of one host."""

    pp: int
    dp: int
    ep: int

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.ep

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different data: all of one stage's."""
        return self.dp * self.ep

    def place(self, rank: int) -> tuple[int, int, int]:
        """(pp, dp, ep) of a global rank."""
        return rank // (self.dp * self.ep), rank // self.ep % self.dp, rank % self.ep


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process and its groups."""

    layout: Layout
    rank: int
    device: torch.device
    mesh: DeviceMesh
    """Axes pp and data: all ranks of a stage read different data."""
    lives: Mapping[int, Life]
    """The processes of those ranks that run on this host."""
    stage_mesh: DeviceMesh | None = None
    """The ranks of this rank's stage on the axes ep and dp, in this order: a layer's experts are
    cut over ep first. None without expert parallelism: the data ranks are dp."""
    store_prefix: str = ""
    """Goes before the names of stores: one world can build several pipelines, one after another,
    if each has its own, the same on all ranks."""
    groups: dict[tuple[str, tuple[int, ...], float], dist.ProcessGroup] = field(
        default_factory=dict
    )
    """Groups besides the mesh's, by what they are for, members and limit: each lasts as long as the
    world, and takes about 1 GB of a GPU."""

    def part(self) -> None:
        """States that this process is about to end and has said all it had to: it is not lost."""
        with contextlib.suppress(RuntimeError):  # without the store nobody is left to be told
            self.world_store("lives").set(f"{_PARTED_KEY} {self.rank}", "")

    def lost(self, *, within_seconds: float = 0) -> tuple[int, ...]:
        """The ranks whose processes ended first, without parting; the same on every rank that asks.
        Waits so long for the first of them."""
        deadline = time.monotonic() + within_seconds
        while not (lost := self._known_loss()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return lost

    def _known_loss(self) -> tuple[int, ...]:
        ended = [rank for rank, life in self.lives.items() if life.has_ended]
        with contextlib.suppress(RuntimeError):  # the store is lost too: what is seen has to do
            store = self.world_store("lives")
            ended = [rank for rank in ended if not store.check([f"{_PARTED_KEY} {rank}"])]
            if ended:  # the first to see a loss states it for all
                text = store.compare_set(_LOST_KEY, "", ",".join(map(str, ended))).decode()
            else:
                text = store.get(_LOST_KEY).decode() if store.check([_LOST_KEY]) else ""
            return tuple(map(int, text.split(","))) if text else ()
        return tuple(ended)

    @property
    def speaks(self) -> bool:
        """Whether this rank is the one that tells the user: the lowest that is not lost."""
        lost = self.lost()
        return self.rank == min(r for r in range(self.layout.world) if r not in lost)

    @property
    def pp_rank(self) -> int:
        return self.layout.place(self.rank)[0]

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank reads."""
        _, dp, ep = self.layout.place(self.rank)
        return dp * self.layout.ep + ep

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        """The ranks that hold the other stages of this model replica, by pp rank."""
        return self.mesh.get_group("pp")

    @property
    def data_mesh(self) -> DeviceMesh:
        """The ranks that hold the same stages and read other data."""
        return self.mesh["data"]

    @property
    def data_group(self) -> dist.ProcessGroup:
        return self.mesh.get_group("data")

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The ranks that hold the same stages and the same experts of them."""
        return self.data_mesh if self.stage_mesh is None else self.stage_mesh["dp"]

    @property
    def expert_group_ranks(self) -> tuple[int, ...]:
        """The ranks over which the experts of this rank's layers lie: neighbours."""
        first = self.rank - self.rank % self.layout.ep
        return tuple(range(first, first + self.layout.ep))

    @property
    def world_group(self) -> dist.ProcessGroup:
        """All ranks."""
        group = dist.group.WORLD
        assert group is not None, "join comes first"
        return group

    def world_store(self, name: str) -> Store:
        """A store that all ranks share, under a name of its own."""
        return PrefixStore(self.store_prefix + name, _get_default_store())

    def pipeline_store(self) -> Store:
        """A store that the ranks of this pipeline share and no other pipeline writes to."""
        return self.world_store(f"pipeline {self.data_rank}")


def started_world() -> int:
    """How many processes the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_world(layout: Layout) -> None:
    """Raises ConfigError unless the launcher started as many processes as the layout needs."""
    if (world := started_world()) != layout.world:
        raise ConfigError(
            f"pp.size {layout.pp} x parallel.dp {layout.dp} x parallel.ep {layout.ep} needs"
            f" {layout.world} processes, {world} started; use torchrun --nproc-per-node"
            f" {layout.world} or change one of the three"
        )


def check_gpus(environment: Mapping[str, str], num_gpus: int) -> None:
    """Raises ConfigError, alike in all processes of a host, unless it has a GPU for each. Pure."""
    started = int(environment.get("LOCAL_RANK", "0")) + 1
    started = max(started, int(environment.get("LOCAL_WORLD_SIZE", "1")))
    if started > num_gpus:
        gpus = f"{num_gpus or 'no'} GPU{'' if num_gpus == 1 else 's'}"
        fewer = f"start {num_gpus} on it, or " if num_gpus else ""
        raise ConfigError(
            f"{started} process{'es' if started > 1 else ''} started on a host with {gpus}, each"
            f' needs one of its own; {fewer}set run.device = "cpu"'
        )


def started_rank() -> int:
    """This process's rank by the launcher; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def join(layout: Layout, *, use_cuda: bool, timeout_seconds: float) -> Ranks:
    """Joins the process group and makes the mesh. Without a launcher the world is this process.
    A collective; on CUDA each process of a host takes the GPU of its local rank. Raises ConfigError
    on all ranks of a host that has fewer."""
    if use_cuda:
        check_gpus(os.environ, torch.cuda.device_count())
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    mesh = init_device_mesh(
        device.type, (layout.pp, layout.num_data_ranks), mesh_dim_names=("pp", "data")
    )
    stage_mesh = _stage_mesh(layout, device) if layout.ep > 1 else None
    for each in (mesh, *([stage_mesh] if stage_mesh else [])):
        for group in each.get_all_groups():
            _open_communicator(group, device)
    return Ranks(layout, dist.get_rank(), device, mesh, _swap_lives(), stage_mesh)


def _stage_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    return DeviceMesh(device.type, ranks_by_place(layout), mesh_dim_names=("pp", "ep", "dp"))[
        "ep", "dp"
    ]


def ranks_by_place(layout: Layout) -> torch.Tensor:
    """Ranks by (pp, ep, dp). A copy: a mesh reads its axes' order from the strides, and a
    transposed view keeps those of axes of size 1 as they were."""
    by_place = torch.arange(layout.world).view(layout.pp, layout.dp, layout.ep)
    return by_place.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def open_expert_group(
    ranks: Ranks, *, timeout_seconds: float, stage: int | None = None
) -> dist.ProcessGroup:
    """The group of `ranks.expert_group_ranks`, in which an exchange may take so long; of each
    `stage` its own, as those of two may be under way at once. A collective of these ranks alone."""
    what = "experts" if stage is None else f"experts of stage {stage}"
    return _open_group(ranks, ranks.expert_group_ranks, what, timeout_seconds)


def open_table_group(ranks: Ranks, *, timeout_seconds: float) -> dist.ProcessGroup:
    """As `open_expert_group`, of the ranks that hold the same stages: an Engram table lies over
    all of them. One for all tables, whose rows every rank asks for in the same order."""
    num = ranks.layout.num_data_ranks
    first = ranks.pp_rank * num
    return _open_group(ranks, tuple(range(first, first + num)), "tables", timeout_seconds)


def _open_group(
    ranks: Ranks, members: tuple[int, ...], what: str, timeout_seconds: float
) -> dist.ProcessGroup:
    key = (what, members, timeout_seconds)
    if (known := ranks.groups.get(key)) is not None:
        return known
    group: dist.ProcessGroup | None = dist.new_group(
        list(members),
        timeout=timedelta(seconds=timeout_seconds),
        use_local_synchronization=True,
        group_desc=what,
    )
    assert group is not None
    _open_communicator(group, ranks.device)
    ranks.groups[key] = group
    return group


def _open_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """A communicator is made in its group's first collective, which all its ranks have to be in;
    and it wants memory of the device, of which a step may have left none."""
    if device.type == "cuda":
        dist.all_reduce(torch.zeros((), device=device), group=group)


def _swap_lives() -> dict[int, Life]:
    store = PrefixStore("lives", _get_default_store())
    store.set(str(dist.get_rank()), str(life_of(os.getpid())))
    texts = store.multi_get([str(rank) for rank in range(dist.get_world_size())])
    lives = {rank: parse_life(text.decode()) for rank, text in enumerate(texts)}
    return {rank: life for rank, life in lives.items() if life is not None}


def leave() -> None:
    """Leaves the process group. Does nothing when there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # Gloo's threads let go of a message's tensors a moment after its wait has returned, which
        # takes the interpreter's lock; one that asks for it while the interpreter ends would take
        # the process down by SIGABRT. No call waits for them. On a loaded machine 4 of 39 ends
        # were lost so, with this pause none of 33.
        time.sleep(_LET_GO_SECONDS)
