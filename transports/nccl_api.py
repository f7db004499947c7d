"""The NCCL calls that `nccl` and `put` need, by ctypes; `nccl_library` chooses whose.

Not torch's process groups, for three reasons: torch ends communicators one by one, which hangs
while a kernel of another one waits for its peer; its own watchdog may end the process before ours
has named the channel; and it moves each transfer to a stream of its own.
Signatures and struct: the public nccl.h of 2.30.7 and 2.32.3.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ppruntime.transports.base import TransportError

UNIQUE_ID_BYTES: Final = 128
UINT8: Final = 1  # ncclUint8
WINDOW_SYMMETRIC: Final = 1  # NCCL_WIN_COLL_SYMMETRIC
CTA_POLICY_ZERO: Final = 2  # NCCL_CTA_POLICY_ZERO
_MAGIC: Final = 0xCAFEBEEF
_CONFIG_VERSION: Final = 23007  # the header that `Config` is taken from
_UNDEFINED: Final = -(2**31)  # NCCL_CONFIG_UNDEF_INT


class UniqueId(ctypes.Structure):
    """ncclUniqueId; travels by value."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class WaitSignalDesc(ctypes.Structure):
    """ncclWaitSignalDesc_t: wait for `num_signals` more signals of `peer`."""

    _fields_ = (
        ("num_signals", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("signal_index", ctypes.c_int),
        ("context", ctypes.c_int),
    )


_CONFIG_2_30 = (
    ("size", ctypes.c_size_t),
    ("magic", ctypes.c_uint),
    ("version", ctypes.c_uint),
    ("blocking", ctypes.c_int),
    ("cga_cluster_size", ctypes.c_int),
    ("min_ctas", ctypes.c_int),
    ("max_ctas", ctypes.c_int),
    ("net_name", ctypes.c_char_p),
    ("split_share", ctypes.c_int),
    ("traffic_class", ctypes.c_int),
    ("comm_name", ctypes.c_char_p),
    ("collnet_enable", ctypes.c_int),
    ("cta_policy", ctypes.c_int),
    ("shrink_share", ctypes.c_int),
    ("nvls_ctas", ctypes.c_int),
    ("num_channels_per_net_peer", ctypes.c_int),
    ("nvlink_centric_sched", ctypes.c_int),
    ("graph_usage_mode", ctypes.c_int),
    ("num_rma_ctx", ctypes.c_int),
    ("max_p2p_peers", ctypes.c_int),
    ("graph_stream_ordering", ctypes.c_int),
)


class Config(ctypes.Structure):
    """ncclConfig_t as 2.30.7 has it. NCCL only appends fields and reads `size` bytes, so a newer
    library takes it too and uses its own defaults for what it does not hold."""

    _fields_ = _CONFIG_2_30


def make_config(version: int, name: bytes) -> Config:
    """NCCL's defaults for a communicator of its own: calls block until they are enqueued, nothing
    is shared with others. `name` must outlive the communicator."""
    config = Config()
    for field, kind in _CONFIG_2_30:
        if kind is ctypes.c_int:
            setattr(config, field, _UNDEFINED)
    config.size, config.magic = ctypes.sizeof(Config), _MAGIC
    config.version = min(version, _CONFIG_VERSION)
    config.blocking, config.split_share, config.comm_name = 1, 0, name
    return config


def version_text(version: int) -> str:
    """23203 -> 2.32.3; before 2.9 the code had one digit less: 2708 -> 2.7.8."""
    major_unit = 10000 if version >= 10000 else 1000
    return f"{version // major_unit}.{version % major_unit // 100}.{version % 100}"


_POINTER = ctypes.c_void_p
_OUT = ctypes.POINTER(ctypes.c_void_p)
# Buffer, count, datatype, peer, communicator, stream.
_SEND_RECV: Final = (_POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _POINTER, _POINTER)
_PROTOTYPES: Final[dict[str, tuple[type, ...]]] = {
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (_OUT, ctypes.c_int, UniqueId, ctypes.c_int, ctypes.POINTER(Config)),
    "ncclCommDestroy": (_POINTER,),
    "ncclCommAbort": (_POINTER,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclSend": _SEND_RECV,
    "ncclRecv": _SEND_RECV,
    "ncclMemAlloc": (_OUT, ctypes.c_size_t),
    "ncclMemFree": (_POINTER,),
    "ncclCommWindowRegister": (_POINTER, _POINTER, ctypes.c_size_t, _OUT, ctypes.c_int),
    "ncclCommWindowDeregister": (_POINTER, _POINTER),
    "ncclPutSignal": (
        _POINTER,  # localbuff
        ctypes.c_size_t,  # count
        ctypes.c_int,  # datatype
        ctypes.c_int,  # peer
        _POINTER,  # peerWin: this rank's handle of the window
        ctypes.c_size_t,  # peerWinOffset, bytes
        ctypes.c_int,  # sigIdx
        ctypes.c_int,  # ctx
        ctypes.c_uint,  # flags
        _POINTER,  # comm
        _POINTER,  # stream
    ),
    "ncclSignal": (
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_uint,
        _POINTER,
        _POINTER,
    ),
    "ncclWaitSignal": (ctypes.c_int, ctypes.POINTER(WaitSignalDesc), _POINTER, _POINTER),
}


class Nccl:
    """A loaded libnccl. Communicators, windows and streams are integer handles.

    Not thread-safe per communicator. Every call raises TransportError with NCCL's own words.
    """

    def __init__(self, path: str, where: str) -> None:
        """Loads the library; raises OSError if there is none, AttributeError if it is no NCCL."""
        self.where = where
        self._library = ctypes.CDLL(path)
        version = ctypes.c_int()
        self._library.ncclGetVersion(ctypes.byref(version))
        self.version = version.value
        self._calls: dict[str, Callable[..., int]] = {}

    def unique_id(self) -> bytes:
        """What both ranks of a communicator have to be given."""
        unique_id = UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(unique_id)

    def init(self, unique_id: bytes, rank: int, config: Config) -> int:
        """A communicator of two ranks on the current device. Blocks until the other one calls."""
        comm = _POINTER()
        self._call(
            "ncclCommInitRankConfig",
            ctypes.byref(comm),
            2,
            UniqueId.from_buffer_copy(unique_id),
            rank,
            ctypes.byref(config),
        )
        return _handle(comm)

    def destroy(self, comm: int) -> None:
        """Gives back the communicator: waits for its work, and on one host for the other rank to
        destroy its end too. For ever, if that one never does."""
        self._call("ncclCommDestroy", comm)

    def abort(self, comms: Sequence[int]) -> None:
        """Ends kernels that wait for a peer and gives all the communicators back, without a word to
        the other ranks.

        In one group: giving one back may synchronise the GPU, so the flags that end the kernels of
        all have to be up before the first. May still block for ever if other work hangs on the GPU.
        Source: NVIDIA/nccl#1013, pytorch/pytorch#119797.
        """
        with self.group():
            for comm in comms:
                self._call("ncclCommAbort", comm)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """What is called inside starts together, when the block ends."""
        self._call("ncclGroupStart")
        try:
            yield
        finally:
            self._call("ncclGroupEnd")

    def send(self, source: int, num_bytes: int, peer: int, comm: int, stream: int) -> None:
        """Sends bytes; when the stream is past it they may be overwritten."""
        self._call("ncclSend", source, num_bytes, UINT8, peer, comm, stream)

    def recv(self, target: int, num_bytes: int, peer: int, comm: int, stream: int) -> None:
        """Receives bytes. From where the stream gets here until the peer sends, a kernel waits."""
        self._call("ncclRecv", target, num_bytes, UINT8, peer, comm, stream)

    def alloc(self, num_bytes: int) -> int:
        """Device memory that a window can be made of; its address."""
        address = _POINTER()
        self._call("ncclMemAlloc", ctypes.byref(address), num_bytes)
        return _handle(address)

    def free(self, address: int) -> None:
        self._call("ncclMemFree", address)

    def register(self, comm: int, address: int, num_bytes: int) -> int | None:
        """A window of both ranks' memory. Collective, blocks. None where the machine has no support
        for it: NCCL reports success then, with a null handle."""
        window = _POINTER()
        self._call(
            "ncclCommWindowRegister",
            comm,
            address,
            num_bytes,
            ctypes.byref(window),
            WINDOW_SYMMETRIC,
        )
        return window.value

    def deregister(self, comm: int, window: int) -> None:
        """Local; nothing may be using the window."""
        self._call("ncclCommWindowDeregister", comm, window)

    def put_signal(
        self,
        source: int,
        num_bytes: int,
        peer: int,
        window: int,
        offset: int,
        comm: int,
        stream: int,
    ) -> None:
        """Puts bytes from `source` (in a window of the same communicator) to `offset` in the peer's
        part of `window`, then raises the peer's signal count by one. When the stream is past it the
        source may be overwritten."""
        self._call(
            "ncclPutSignal", source, num_bytes, UINT8, peer, window, offset, 0, 0, 0, comm, stream
        )

    def signal(self, peer: int, comm: int, stream: int) -> None:
        """Raises the peer's signal count by one, after all earlier puts to it have landed."""
        self._call("ncclSignal", peer, 0, 0, 0, comm, stream)

    def wait_signal(self, peer: int, num_signals: int, comm: int, stream: int) -> None:
        """Holds the stream until `num_signals` more signals of the peer came; consumes them."""
        description = WaitSignalDesc(num_signals, peer, 0, 0)
        self._call("ncclWaitSignal", 1, ctypes.byref(description), comm, stream)

    def _call(self, name: str, *arguments: object) -> None:
        call = self._calls.get(name)
        if call is None:
            try:
                call = getattr(self._library, name)
            except AttributeError as error:
                raise TransportError(
                    f"NCCL {version_text(self.version)} ({self.where}) has no {name}; use a"
                    " newer one"
                ) from error
            call.argtypes, call.restype = _PROTOTYPES[name], ctypes.c_int
            self._calls[name] = call
        code = call(*arguments)
        if code:
            raise TransportError(
                f"{name} failed: {self._words(code)} (NCCL {version_text(self.version)},"
                f" {self.where})"
            )

    def _words(self, code: int) -> str:
        text, last = self._library.ncclGetErrorString, self._library.ncclGetLastError
        text.argtypes, text.restype = (ctypes.c_int,), ctypes.c_char_p
        last.argtypes, last.restype = (_POINTER,), ctypes.c_char_p
        said, detail = text(code) or b"", last(None) or b""
        return f"{said.decode()} ({detail.decode().strip()})" if detail else said.decode()


def _handle(pointer: ctypes.c_void_p) -> int:
    assert pointer.value, "NCCL reported success and gave a null handle"
    return pointer.value
