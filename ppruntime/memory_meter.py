"""Measures the memory of this rank's step, for the ledger."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ppruntime.build import Pipeline
from ppruntime.ledger import MeasuredMemory
from ppruntime.memory_watch import DeviceCounter, MemoryWatch, TensorCounter
from ppruntime.messages import gather_bytes
from ppruntime.models.dispatch import Checked
from ppruntime.trainer import Trainer
from ppruntime.transports.base import HoldsDeviceMemory
from ppruntime.wrap import gathered_weights


class MemoryMeter:
    """Counts over one step at a time. On a CPU nobody counts live tensors: there is a peak only of
    a step that is watched."""

    def __init__(self, trainer: Trainer, *, rank: int, device: torch.device) -> None:
        self._trainer, self._rank = trainer, rank
        self._device = device if device.type == "cuda" else None

    def watch(self) -> MemoryWatch:
        """Of the next step, op by op."""
        if self._device is not None:
            others = outside_bytes(self._trainer.pipeline)
            return MemoryWatch(DeviceCounter(self._device, other_bytes=others))
        pipeline = self._trainer.pipeline
        units = [unit for _, unit in pipeline.units]
        # Tables that are to lie in host memory count nowhere, as on a GPU.
        state = (
            tensor
            for name, tensor in self._trainer.state_tensors().items()
            if _parameter(name) not in pipeline.on_host
        )
        standing = (*state, *gathered_weights(units))
        counter = TensorCounter(
            standing, other_bytes=pipeline.slot_bytes, is_elsewhere=pipeline.host_pool.has
        )
        return MemoryWatch(counter)

    def start(self) -> None:
        """A step begins."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def read(self, watch: MemoryWatch | None = None) -> MeasuredMemory:
        """What this rank had since `start`; `watch`: by which the step was watched."""
        pipeline, peak, reserved = self._trainer.pipeline, None, None
        params = {n: p for n, p in pipeline.params.items() if n not in pipeline.on_host}
        if self._device is not None:
            stats = torch.cuda.memory_stats(self._device)
            peak, reserved = stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]
            outside = outside_bytes(pipeline)
            peak += outside
            reserved += outside
        if watch is not None:
            peak = max(peak or 0, watch.peak_bytes)
            if reserved is not None:
                reserved = max(reserved, watch.reserved_bytes)
        moments = {
            name: tensor
            for name, tensor in self._trainer.state_tensors().items()
            if name.startswith("optim.") and name.split(".", 2)[2] in params
            if not name.startswith("optim.step.")
        }
        return MeasuredMemory(
            rank=self._rank,
            resting_parameters=sum(map(_local_bytes, params.values())),
            optimizer=sum(map(_local_bytes, moments.values())),
            peak_bytes=peak,
            reserved_bytes=reserved,
        )

    def gather(
        self, group: ProcessGroup, watch: MemoryWatch | None = None
    ) -> tuple[MeasuredMemory, ...]:
        """`read` of every rank of the pipeline. A collective."""
        found = gather_bytes(msgspec.json.encode(self.read(watch)), group)
        return tuple(msgspec.json.decode(each, type=MeasuredMemory) for each in found)


def outside_bytes(pipeline: Pipeline) -> int:
    """Buffers of a pipeline on this rank's GPU that torch's allocator does not count."""
    found = sum(d.outside_bytes for d in pipeline.dispatchers if isinstance(d, Checked))
    if isinstance(pipeline.transport, HoldsDeviceMemory):
        found += pipeline.transport.outside_bytes
    return found


def _parameter(name: str) -> str:
    """Whose state a tensor is, by its name in `Trainer.state_tensors`."""
    return name.split(".", 2)[2] if name.startswith("optim.") else name


def _local_bytes(tensor: Tensor) -> int:
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.numel() * local.element_size()
