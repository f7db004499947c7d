"""Tokens between the GPUs of a host by the package deep_ep: fills `token_buffer.TokenBuffer`.

Its kernels run on a stream of their own, on as many multiprocessors as they are given. Only bf16
rows, or FP8 ones with scales, and 2, 4 or 8 ranks. A rank that does not come is found on the host
while counts are waited for, after the package's own limit of 100 seconds; in the other calls it
ends the process by an error of the device.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppruntime.experts.exchange import DispatchError
from ppruntime.models.fp8_wire import WireRows
from ppruntime.models.token_buffer import Arrived, Pending

NUM_RANKS = (2, 4, 8)
"""Ranks that its kernels inside a host are built for."""
_ASKED = 'moe.dispatch.type = "deep_ep"'
_REMEDY = 'use moe.dispatch.type = "torch" to run without it'
_NEEDED = ("get_dispatch_layout", "dispatch", "combine", "capture", "set_num_sms")


def unavailable_reason(device: torch.device) -> str | None:
    """Why tokens cannot be moved by deep_ep on this machine; None if they can."""
    if device.type != "cuda":
        return f"{_ASKED} moves tokens between GPUs, this run is on the {device.type}; {_REMEDY}"
    if find_spec("deep_ep") is None:
        return (
            f"{_ASKED} needs the package deep_ep, which is not installed; install "
            f"ppruntime[deep-ep] (built for torch 2.11, CUDA 13) or {_REMEDY}"
        )
    try:
        package = _package()
    except (ImportError, OSError) as error:
        return (
            f"{_ASKED}: importing deep_ep failed with: {error}; put the folder of "
            f"libnvshmem_host.so.3 on LD_LIBRARY_PATH if that is what it misses, or {_REMEDY}"
        )
    missing = [name for name in _NEEDED if not hasattr(package.Buffer, name)]
    if missing:
        return f"{_ASKED}: this deep_ep's Buffer has no {', '.join(missing)}; {_REMEDY}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"{_ASKED} needs Hopper GPUs (sm_90); {_REMEDY}"
    return None


def _package() -> ModuleType:
    return importlib.import_module("deep_ep")


class DeepEpBuffer:
    """A buffer of deep_ep over a process group. Made before the first step, by all of its ranks:
    memory of `hidden`-wide rows is mapped between them."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: tuple[int, ...], *, hidden: int, num_sms: int
    ) -> None:
        package = _package()
        self._type: Any = package.Buffer
        self._index_dtype = getattr(package, "topk_idx_t", torch.int64)
        self._ranks = ranks
        self._type.set_num_sms(num_sms)
        row_bytes = hidden * torch.bfloat16.itemsize
        num_bytes = max(
            config.get_nvl_buffer_size_hint(row_bytes, len(ranks))
            for config in (
                self._type.get_dispatch_config(len(ranks)),
                self._type.get_combine_config(len(ranks)),
            )
        )
        self._buffer = self._type(group, num_nvl_bytes=num_bytes)

    @property
    def rank(self) -> int:
        rank: int = self._buffer.rank
        return rank

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def now(self) -> object:
        event: object = self._type.capture()
        return event

    def dispatch(
        self, x: WireRows, expert_NK: Tensor, weight_NK: Tensor, num_experts: int, *, after: object
    ) -> Pending[Arrived]:
        on_its_stream = {"async_finish": True, "allocate_on_comm_stream": True}
        expert_NK = expert_NK.to(self._index_dtype)
        to_rank, _, to_expert, is_in_rank, laid_out = self._buffer.get_dispatch_layout(
            expert_NK, num_experts, previous_event=after, **on_its_stream
        )
        try:
            rows, expert_SK, weight_SK, counts, handle, event = self._buffer.dispatch(
                x,
                num_tokens_per_rank=to_rank,
                is_token_in_rank=is_in_rank,
                num_tokens_per_expert=to_expert,
                topk_idx=expert_NK,
                topk_weights=weight_NK,
                previous_event=laid_out,
                **on_its_stream,
            )
        except RuntimeError as error:
            raise self._lost("tokens", error) from error

        def arrived() -> Arrived:
            event.current_stream_wait()
            return Arrived(rows, expert_SK.to(torch.int64), weight_SK, counts, tuple(handle))

        return arrived

    def again(self, x: WireRows, handle: tuple[Tensor, ...], *, after: object) -> Pending[WireRows]:
        rows, *_, event = self._buffer.dispatch(
            x,
            handle=handle,
            previous_event=after,
            async_finish=True,
            allocate_on_comm_stream=True,
        )

        def arrived() -> WireRows:
            event.current_stream_wait()
            found: WireRows = rows
            return found

        return arrived

    def combine(
        self, y_SD: Tensor, handle: tuple[Tensor, ...], weight_SK: Tensor | None, *, after: object
    ) -> Pending[tuple[Tensor, Tensor | None]]:
        total_ND, weight_NK, event = self._buffer.combine(
            y_SD,
            handle,
            topk_weights=weight_SK,
            previous_event=after,
            async_finish=True,
            allocate_on_comm_stream=True,
        )

        def arrived() -> tuple[Tensor, Tensor | None]:
            event.current_stream_wait()
            return total_ND, weight_NK

        return arrived

    def _lost(self, what: str, error: RuntimeError) -> DispatchError:
        first_line = (str(error).splitlines() or ["no reason given"])[0]
        return DispatchError(
            f"a rank of the expert group of ranks {list(self._ranks)} did not take part in sending"
            f" {what}: it is late or has ended ({first_line})"
        )
