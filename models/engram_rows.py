"""The rows of an Engram table that lies over several ranks, in host memory, or is read ahead.

Which rows a micro-batch reads depends on its token ids alone. So all of a step's are known when it
begins, and each rank tells the others then:

    announce   rows of every micro-batch, each once, to their owners: counts, then row numbers
    start      owners read the rows, the asking ranks get them; may be several forwards early
    fetch      a forward takes its rows to its tokens' places
    add        a backward sums what falls on one row and sends the sums to the row's owner, which
               adds them in place, ranks in order, in fp32
    flush      behind the step's last backward: the sums become the table's gradient, a mean over
               the ranks

`start`, and exchange and adding in `add`, may run on a stream beside the computations; the values
are the same. Rows are cut as FSDP cuts them: ceil(R / P) on every rank, the last ones get what is
left. All ranks run the same order of work, so they meet in the exchanges (see `all_to_all`).

Exactness. Rows come as they are stored, rounded to the compute dtype after reading. A row's
gradient of one micro-batch is summed in the order of tokens; over micro-batches and ranks the sums
are added in the order of the backwards, ranks in order: for one micro-batch a rank the bits of one
process that has the ranks' micro-batches one after another.

Shape letters: B sequences, T tokens, H columns = rows per token, N = B T H, U different rows of a
micro-batch, V rows that all ranks ask this one for, W row width, P ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ppruntime.models.engram_kernels import REFERENCE, EngramKernels

if TYPE_CHECKING:
    from ppruntime.models.dispatch import Exchange


def open_to_device(tensor: Tensor) -> Tensor:
    """The tensor, in host memory that this process's GPU can now read and write where it is, until
    nobody has it any more.

    Torch's own pinned memory comes in powers of two, up to twice of what a table needs.
    """
    if not tensor.nbytes:
        return tensor
    # Zero is what the runtime calls success.
    failure = int(
        torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            tensor.data_ptr(), tensor.nbytes, 0
        )
    )
    if failure:
        _take_up_error()
        raise RuntimeError(
            f"the host cannot open {tensor.nbytes} bytes of Engram tables to the device (CUDA error"
            f' {failure}); give the process more lockable memory, or use engram.tables = "device"'
        )
    # Memory that went back to the system open would fail copies of whoever gets its addresses next.
    weakref.finalize(tensor.untyped_storage(), _close_to_device, tensor.data_ptr()).atexit = False
    return tensor


def _close_to_device(address: int) -> None:
    torch.cuda.synchronize()
    if torch.cuda.cudart().cudaHostUnregister(address):  # type: ignore[no-untyped-call]
        _take_up_error()


def _take_up_error() -> None:
    """CUDA hands a failed call's error to whoever asks next: that is here, not a later launch."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")


TOGETHER = 32
"""Micro-batches whose rows are hashed and sorted at once. One by one they took a step of 16 with
two Engrams some 30 ms by a record's idle time, in which no stage had anything to do."""

T = TypeVar("T")


def in_groups(items: Iterable[T], size: int = TOGETHER) -> Iterator[list[T]]:
    """The items, `size` at a time; the last group has what is left."""
    left = iter(items)
    while group := list(islice(left, size)):
        yield group


def unique_rows(rows: Sequence[Tensor], num_rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Of each tensor of row numbers, all below `num_rows`, those that occur: in order, each once.
    One sort; the host waits for it twice."""
    keys = [each.flatten().long() + place * num_rows for place, each in enumerate(rows)]
    found = torch.unique(torch.cat(keys))
    bounds = torch.arange(len(rows) + 1, device=found.device) * num_rows
    ends: list[int] = torch.searchsorted(found, bounds).tolist()
    return [
        (found[first:stop] - place * num_rows).to(dtype)
        for place, (first, stop) in enumerate(pairwise(ends))
    ]


def rows_held(num_rows: int, rank: int, num_ranks: int) -> range:
    """The rows of a table that a rank has."""
    share = -(-num_rows // num_ranks)
    return range(min(rank * share, num_rows), min((rank + 1) * share, num_rows))


class Beside:
    """A stream beside the current one; without one, all runs where it is called."""

    def __init__(self, stream: torch.cuda.Stream | None = None) -> None:
        self._stream = stream

    @contextmanager
    def running(self, *, after_current: bool) -> Iterator[None]:
        """Inside, work goes to that stream; behind what the current one has been given, if
        wanted."""
        if self._stream is None:
            yield
            return
        if after_current:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """An event behind all that the stream has been given; None: it is done in order anyway."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def join(self) -> None:
        """The current stream waits for all that the stream has been given."""
        if (mark := self.mark()) is not None:
            torch.cuda.current_stream().wait_event(mark)

    def lend(self, tensor: Tensor) -> None:
        """Keeps memory of a tensor of another stream until the work given so far has run."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


@dataclass(frozen=True, slots=True)
class Routes:
    """Which rows one micro-batch reads, and who has them."""

    rows_U: Tensor
    """In order, each once."""
    send: list[int]
    """How many of them each rank has."""
    asked_V: Tensor
    """What the ranks ask this one for, one rank's after another's; counted from its first row."""
    receive: list[int]
    """How many each rank asks for."""


@dataclass(frozen=True, slots=True)
class _Ready:
    rows_UW: Tensor
    mark: torch.cuda.Event | None


class TableRows:
    """One table of this rank, for the Engram that reads it.

    `local` are the rows held here, fp32, on this rank's device or in host memory that the device
    can reach. `exchange` is None where all rows are here. `beside` is where lookups that start
    early run; None: they run in the forward's own stream.
    """

    def __init__(
        self,
        local: Tensor,
        *,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        exchange: Exchange | None = None,
        kernels: EngramKernels = REFERENCE,
        beside: Beside | None = None,
    ) -> None:
        self._local, self._dtype, self._device = local, dtype, device
        # By type: "cuda" is another device than "cuda:0", and the same one.
        self._is_on_host = local.device.type != device.type
        self._exchange, self._kernels, self._beside = exchange, kernels, beside or Beside()
        self._num_ranks, self._num_rows = exchange.num_ranks if exchange else 1, num_rows
        held = [rows_held(num_rows, rank, self._num_ranks) for rank in range(self._num_ranks)]
        self._first = held[exchange.rank if exchange else 0].start
        self._index_dtype = torch.int32 if num_rows < 2**31 else torch.int64
        bounds = [part.start for part in held] + [num_rows]
        self._bounds = torch.tensor(bounds, dtype=self._index_dtype, device=device)
        self._routes: dict[int, Routes] = {}
        self._ready: dict[int, _Ready] = {}
        self._latest: Routes | None = None
        self._sums: Tensor | None = None
        self._host_sums: Tensor | None = None
        self.turn: int | None = None
        """The micro-batch that the Engram computes just now, forward or back; None, or one that was
        not announced: its rows are looked up when they are asked for."""

    @property
    def num_bytes_announced(self) -> int:
        """What the routes of the announced micro-batches take up."""
        return sum(r.rows_U.nbytes + r.asked_V.nbytes for r in self._routes.values())

    def announce(self, rows: Iterable[Tensor]) -> None:
        """A step begins in which micro-batch m reads the m-th of `rows`. A collective; the host
        waits for the device, when nothing of the step is under way yet."""
        with self._beside.running(after_current=True):
            self._routes = dict(enumerate(self._make_routes(rows)))
        self._beside.join()
        self._ready = {}

    def forget(self) -> None:
        """The step is over."""
        self._routes, self._ready, self.turn = {}, {}, None

    def start(self, micro_batch: int) -> None:
        """Looks the rows of an announced micro-batch up. A collective."""
        with self._beside.running(after_current=False):
            rows_UW = self._look_up(self._routes[micro_batch])
        self._ready[micro_batch] = _Ready(rows_UW, self._beside.mark())

    def routes_of(self, rows: Tensor) -> Routes:
        """Of the micro-batch whose turn it is; a collective unless it was announced."""
        routes = None if self.turn is None else self._routes.get(self.turn)
        if routes is None:
            (routes,) = self._make_routes([rows])
        self._latest = routes
        return routes

    def fetch(self, rows: Tensor) -> Tensor:
        """[..., W] in the compute dtype: the table's rows `rows`, by the routes that were asked for
        last. A collective, unless they were looked up before."""
        routes, self._latest = self._latest, None
        assert routes is not None, "rows are fetched by routes"
        ready = None if self.turn is None else self._ready.pop(self.turn, None)
        if ready is None:
            rows_UW = self._look_up(routes)
        else:
            rows_UW = ready.rows_UW
            if ready.mark is not None:
                torch.cuda.current_stream().wait_event(ready.mark)
                rows_UW.record_stream(torch.cuda.current_stream())
        return rows_UW[self._places(rows, routes)]

    def add(self, rows: Tensor, routes: Routes, grad: Tensor) -> None:
        """Adds grad [..., W], the gradient of what `fetch` gave. A collective."""
        places_N = self._places(rows, routes).flatten()
        sums_UW = self._kernels.sum_rows(grad.flatten(0, -2), places_N, len(routes.rows_U))
        with self._beside.running(after_current=True):
            received_VW = self._swap(
                sums_UW, routes.send, routes.receive, "gradients of Engram rows"
            )
            if self._sums is None:
                self._sums = self._blank()
            start = 0
            for count in routes.receive:
                part = slice(start, start + count)
                # From one rank a row comes once: nothing depends on the order within.
                self._kernels.add(self._sums, routes.asked_V[part], received_VW[part])
                start += count
        for lent in (sums_UW, routes.asked_V):
            self._beside.lend(lent)

    def flush(self) -> Tensor | None:
        """The step's gradient of the rows here, a mean over the ranks; None without a backward.
        The caller owns it."""
        sums, self._sums = self._sums, None
        if sums is None:
            return None
        self._beside.join()
        if self._is_on_host:  # whoever reads it there does so from the host
            torch.cuda.current_stream().synchronize()
        return sums.div_(self._num_ranks) if self._num_ranks > 1 else sums

    def _blank(self) -> Tensor:
        if not self._is_on_host:
            return torch.zeros_like(self._local)
        if self._host_sums is None:  # kept: to open host memory to a device takes long
            self._host_sums = open_to_device(torch.zeros_like(self._local))
        return self._host_sums.zero_()

    def _look_up(self, routes: Routes) -> Tensor:
        """[U, W] in the compute dtype. A collective."""
        asked_VW = self._kernels.gather(self._local, routes.asked_V, self._dtype)
        return self._swap(asked_VW, routes.receive, routes.send, "Engram rows")

    def _places(self, rows: Tensor, routes: Routes) -> Tensor:
        """Where in rows_U each row stands."""
        return torch.searchsorted(routes.rows_U, rows.to(self._index_dtype))

    def _make_routes(self, rows: Iterable[Tensor]) -> list[Routes]:
        """A collective, in two exchanges for all micro-batches together."""
        unique = [
            each
            for group in in_groups(rows)
            for each in unique_rows(group, self._num_rows, self._index_dtype)
        ]
        if self._exchange is None:
            return [Routes(each, [len(each)], each, [len(each)]) for each in unique]
        ends = torch.stack([torch.searchsorted(each, self._bounds) for each in unique])
        send_PM = ends.diff(dim=1).t().contiguous().cpu()
        receive_PM = torch.empty_like(send_PM)
        self._exchange.begin(list(send_PM), list(receive_PM), "counts of Engram rows")()
        send, receive = send_PM.t().tolist(), receive_PM.t().tolist()
        by_owner = [torch.split(each, counts) for each, counts in zip(unique, send, strict=True)]
        outgoing = [torch.cat(parts) for parts in zip(*by_owner, strict=True)]
        sizes: list[int] = receive_PM.sum(1).tolist()
        incoming = [unique[0].new_empty(size) for size in sizes]
        self._exchange.begin(outgoing, incoming, "numbers of Engram rows")()
        by_rank = [
            torch.split(each, counts)
            for each, counts in zip(incoming, receive_PM.tolist(), strict=True)
        ]
        asked = [torch.cat(parts) - self._first for parts in zip(*by_rank, strict=True)]
        return [Routes(*each) for each in zip(unique, send, asked, receive, strict=True)]

    def _swap(self, rows: Tensor, send: list[int], receive: list[int], what: str) -> Tensor:
        if self._exchange is None:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        outgoing, incoming = torch.split(rows, send), torch.split(received, receive)
        self._exchange.begin(outgoing, incoming, what)()
        return received
