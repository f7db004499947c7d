"""The few calls of the CUDA driver that torch does not offer: stream memory operations, plain
copies to any mapped address, streams that nobody else shares, memory that can be mapped by a peer.

None of them launches a kernel, so none takes an SM from the compute that runs beside it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch

from ppruntime.transports.base import TransportError

WORD_BYTES: Final = 4
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream
_WAIT_GEQ: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ: passes when int32(word - value) >= 0
_WRITE_DEFAULT: Final = 0  # with a system-wide fence before the write; 1 would leave it out
_HIGH_PRIORITY: Final = -1
_USUAL_PRIORITY: Final = 0


class Location(ctypes.Structure):
    """CUmemLocation: a device, by ordinal."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp: what memory to create."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc: who may read and write mapped memory."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


_HANDLE = ctypes.c_void_p  # CUstream, CUcontext
_ADDRESS = ctypes.c_uint64  # CUdeviceptr
_SIZE = ctypes.c_size_t
_MEMORY = ctypes.c_ulonglong  # CUmemGenericAllocationHandle
_FLAGS = ctypes.c_ulonglong
_PROTOTYPES: Final[dict[str, tuple[type, ...]]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(_HANDLE),),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuGetErrorString": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuMemAddressFree": (_ADDRESS, _SIZE),
    "cuMemAddressReserve": (ctypes.POINTER(_ADDRESS), _SIZE, _SIZE, _ADDRESS, _FLAGS),
    "cuMemCreate": (ctypes.POINTER(_MEMORY), _SIZE, ctypes.POINTER(AllocationProp), _FLAGS),
    "cuMemExportToShareableHandle": (ctypes.c_void_p, _MEMORY, ctypes.c_int, _FLAGS),
    "cuMemGetAllocationGranularity": (
        ctypes.POINTER(_SIZE),
        ctypes.POINTER(AllocationProp),
        ctypes.c_int,
    ),
    "cuMemImportFromShareableHandle": (ctypes.POINTER(_MEMORY), ctypes.c_void_p, ctypes.c_int),
    "cuMemMap": (_ADDRESS, _SIZE, _SIZE, _MEMORY, _FLAGS),
    "cuMemRelease": (_MEMORY,),
    "cuMemSetAccess": (_ADDRESS, _SIZE, ctypes.POINTER(AccessDesc), _SIZE),
    "cuMemUnmap": (_ADDRESS, _SIZE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuStreamCreateWithPriority": (ctypes.POINTER(_HANDLE), ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy_v2": (_HANDLE,),
    "cuStreamWaitValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWriteValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint),
}


class Driver:
    """libcuda, bound to the primary context of `device`. Streams are given as integer handles,
    memory as device addresses. Every call is asynchronous and raises TransportError if refused."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.current_stream(device).synchronize()  # makes the primary context current here
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(
                f"the CUDA driver library libcuda.so.1 cannot be loaded ({error}); install the"
                ' NVIDIA driver or set pp.transport = "gloo"'
            ) from error
        self._calls: dict[str, Callable[..., int]] = {}
        for name, arguments in _PROTOTYPES.items():
            try:
                call = getattr(self._library, name)
            except AttributeError as error:
                raise TransportError(
                    f'the CUDA driver has no {name}; update it, or set pp.transport = "nccl"'
                ) from error
            call.argtypes, call.restype = arguments, ctypes.c_int
            self._calls[name] = call
        context = _HANDLE()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        assert context.value, f"no CUDA context is current on {device}"
        self._context = context
        # Bound once: these three run for every transfer.
        self._copy = self._calls["cuMemcpyDtoDAsync_v2"]
        self._write = self._calls["cuStreamWriteValue32_v2"]
        self._wait = self._calls["cuStreamWaitValue32_v2"]

    def enter_thread(self) -> None:
        """Makes the context current in the calling thread; once per thread, before other calls."""
        self.call("cuCtxSetCurrent", self._context)

    def new_stream(self, *, high_priority: bool = True) -> int:
        """A stream of its own. torch's `Stream()` hands out 32 in turn, so two users
        can get the same one; a wait on it would then hold the other user's work."""
        handle = _HANDLE()
        priority = _HIGH_PRIORITY if high_priority else _USUAL_PRIORITY
        self.call("cuStreamCreateWithPriority", ctypes.byref(handle), _NON_BLOCKING, priority)
        assert handle.value
        return handle.value

    def destroy_stream(self, stream: int) -> None:
        """Gives the stream back; work that is on it still runs to its end."""
        self.call("cuStreamDestroy_v2", stream)

    def copy(self, stream: int, destination: int, source: int, num_bytes: int) -> None:
        """Copies between device addresses, of this GPU or a peer; to a peer by a copy engine."""
        if num_bytes:
            self._check(self._copy(destination, source, num_bytes, stream), "cuMemcpyDtoDAsync")

    def write_word(self, stream: int, address: int, value: int) -> None:
        """Writes a 32-bit word, after the stream's earlier work is visible to the whole system."""
        code = self._write(stream, address, value & 0xFFFFFFFF, _WRITE_DEFAULT)
        self._check(code, "cuStreamWriteValue32")

    def wait_word(self, stream: int, address: int, value: int) -> None:
        """Holds the stream until the word has reached `value`, counted modulo 2**32."""
        code = self._wait(stream, address, value & 0xFFFFFFFF, _WAIT_GEQ)
        self._check(code, "cuStreamWaitValue32")

    def call(self, name: str, *arguments: object) -> None:
        """Calls one of `_PROTOTYPES`; raises TransportError with the driver's own words."""
        self._check(self._calls[name](*arguments), name)

    def _check(self, code: int, name: str) -> None:
        if code:
            text = ctypes.c_char_p()
            self._calls["cuGetErrorString"](code, ctypes.byref(text))
            said = (text.value or b"unknown error").decode()
            raise TransportError(f"the CUDA driver refused {name}: {said} (error {code})")


class OwnStream:
    """A stream that only one user has, such as a channel's end; as driver handle and as torch
    stream."""

    def __init__(self, driver: Driver, device: torch.device, *, high_priority: bool = True) -> None:
        self._driver = driver
        self.handle = driver.new_stream(high_priority=high_priority)
        self.torch: torch.cuda.Stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            self.handle, device=device
        )

    def destroy(self) -> None:
        """Idempotent; the torch stream must not be used after it."""
        handle, self.handle = self.handle, 0
        if handle:
            self._driver.destroy_stream(handle)


def new_event() -> torch.cuda.Event:
    """An event without timing, cheap to record and to wait for."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def is_past(event: torch.cuda.Event) -> bool:
    """The stream has run up to where the event was recorded. Raises what the GPU reports."""
    return bool(event.query())  # type: ignore[no-untyped-call]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """One of torch's streams, which others may get too; not for waits that others must not feel."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
