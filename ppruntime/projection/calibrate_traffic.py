"""Messages between two ranks, back to back both ways, while both compute: what a transport costs
compute is the difference between times taken beside them and times taken without."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import TracebackType

import torch

from ppruntime.config import Config
from ppruntime.connect import open_beside
from ppruntime.memory import compute_dtype_name
from ppruntime.models.dims import boundary_bytes, unit_specs
from ppruntime.ranks import Ranks
from ppruntime.transports.base import Boundary, Channel, TensorSpec


def largest_boundary_bytes(config: Config) -> int:
    """Of one micro-batch, over all places at which the model can be cut."""
    train, dims = config.train, config.model.dims
    dtype = compute_dtype_name(config)
    return max(
        boundary_bytes(dims, spec, train.micro_batch_size, train.seq_len, dtype=dtype)
        for spec in unit_specs(dims)[:-1]
    )


class Traffic:
    """A block during which pp ranks 0 and 1 send each other messages of `num_bytes`.

    Entering and leaving are collective. A thread of its own drives the transport, on a device on a
    stream of its own. Who leaves first goes on sending until the other leaves too: each message
    says whether its sender is done, and both stop behind the first pair that says it twice.
    """

    def __init__(self, config: Config, ranks: Ranks, num_bytes: int) -> None:
        assert ranks.layout.world == ranks.layout.pp == 2, "messages go between two ranks"
        payload = TensorSpec("payload", (num_bytes,), torch.uint8)
        ends = Boundary((payload, TensorSpec("is_done", (1,), torch.int32)))
        channels = (
            Channel(0, "forward", 0, 1, 0, 1, ends, 1),
            Channel(1, "backward", 1, 0, 1, 0, ends, 1),
        )
        self._out, self._in = channels[ranks.pp_rank], channels[1 - ranks.pp_rank]
        self._device = ranks.device
        self._payload = torch.ones(num_bytes, dtype=torch.uint8, device=ranks.device)
        self._transport = open_beside(config, ranks, channels)
        self._leaving = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="traffic")
        self.num_messages = 0
        """Each way, so far."""

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._transport.abort(f"the other rank stopped: {error}")
        self._leaving.set()
        self._thread.join()
        self._transport.close()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        on_cuda = self._device.type == "cuda"
        try:
            with (
                torch.cuda.device(self._device) if on_cuda else nullcontext(),
                torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext(),  # type: ignore[no-untyped-call]
            ):
                while not self._exchange():
                    pass
                self._transport.step_end()
        except Exception as error:  # whatever it is, the main thread raises it
            self._error = error

    def _exchange(self) -> bool:
        """One message each way; whether both ranks are done."""
        mine = self._leaving.is_set()
        flag = torch.tensor([mine], dtype=torch.int32, device=self._device)
        number = self.num_messages
        self._transport.post(self._in, number)
        self._transport.send(self._out, number, (self._payload, flag))
        _, theirs = self._transport.take(self._in, number)
        is_last = mine and bool(theirs.item())
        self._transport.release(self._in, number)
        self.num_messages += 1
        return is_last
