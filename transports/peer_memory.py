"""Device memory of one rank that one other rank on the same host has mapped too.

Created through the driver's virtual memory calls and handed over as a file descriptor, through a
Unix socket whose name the store tells; every step has a time limit. Whoever maps memory keeps it
alive: a rank that dies takes its mappings along, never the memory under its peer's copies.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import time
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ppruntime.transports import meeting
from ppruntime.transports.base import TransportError
from ppruntime.transports.driver import AccessDesc, AllocationProp, Driver, Location

_PINNED: Final = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE: Final = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_POSIX_FD: Final = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE: Final = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED: Final = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_LISTEN_SECONDS: Final = 0.2


class MappedMemory:
    """`num_bytes` of device memory at `address`, readable and writable by this rank's GPU."""

    def __init__(self, driver: Driver, device: int, handle: int, num_bytes: int) -> None:
        self._driver, self._handle, self.num_bytes = driver, handle, num_bytes
        address = ctypes.c_uint64()
        driver.call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        self.address = address.value
        driver.call("cuMemMap", self.address, num_bytes, 0, handle, 0)
        access = AccessDesc(Location(_ON_DEVICE, device), _READ_WRITE)
        driver.call("cuMemSetAccess", self.address, num_bytes, ctypes.byref(access), 1)

    def free(self) -> None:
        """Unmaps; nothing on the device may use it any more. Idempotent."""
        address, self.address = self.address, 0
        if address:
            self._driver.call("cuMemUnmap", address, self.num_bytes)
            self._driver.call("cuMemAddressFree", address, self.num_bytes)
            self._driver.call("cuMemRelease", self._handle)


def allocate(driver: Driver, device: int, num_bytes: int) -> tuple[MappedMemory, int]:
    """At least `num_bytes` on `device`, mapped here, and the file descriptor to hand over. Contents
    are undefined. The caller closes the descriptor."""
    prop = AllocationProp(_PINNED, _POSIX_FD, Location(_ON_DEVICE, device))
    granularity = ctypes.c_size_t()
    driver.call(
        "cuMemGetAllocationGranularity",
        ctypes.byref(granularity),
        ctypes.byref(prop),
        _RECOMMENDED,
    )
    num_bytes = -(-num_bytes // granularity.value) * granularity.value
    handle = ctypes.c_ulonglong()
    driver.call("cuMemCreate", ctypes.byref(handle), num_bytes, ctypes.byref(prop), 0)
    descriptor = ctypes.c_int()
    driver.call(
        "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle.value, _POSIX_FD, 0
    )
    return MappedMemory(driver, device, handle.value, num_bytes), descriptor.value


def map_peer(driver: Driver, device: int, descriptor: int, num_bytes: int) -> MappedMemory:
    """The peer's memory, mapped for this rank's GPU. The caller closes the descriptor."""
    handle = ctypes.c_ulonglong()
    driver.call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX_FD)
    return MappedMemory(driver, device, handle.value, num_bytes)


def swap_descriptors(
    store: Store,
    name: str,
    descriptor: int,
    num_bytes: int,
    *,
    is_first: bool,
    timeout_seconds: float,
) -> tuple[int, int]:
    """Gives the peer a file descriptor and a size and gets the peer's, both ends calling with one
    `name`. Raises TransportError when the peer does not come within the limit, or as soon as a rank
    has said why it will not."""
    deadline = time.monotonic() + timeout_seconds
    try:
        with _connected(store, name, is_first, deadline) as connection:
            socket.send_fds(connection, [num_bytes.to_bytes(8, "little")], [descriptor])
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            payload, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
    except OSError as error:
        raise TransportError(
            f"{name}: the peer did not hand over its memory within {timeout_seconds:g} s: {error}"
        ) from error
    if len(payload) != 8 or len(descriptors) != 1:
        for received in descriptors:
            os.close(received)
        raise TransportError(f"{name}: the peer ended while it handed over its memory")
    return descriptors[0], int.from_bytes(payload, "little")


def _connected(store: Store, name: str, is_first: bool, deadline: float) -> socket.socket:
    if is_first:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # An abstract name: no file is left behind, and the random part is only in the store.
            address = f"\0ppruntime-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(1)
            store.set(name, address[1:])
            while True:
                left = deadline - time.monotonic()
                listener.settimeout(max(0.001, min(left, _LISTEN_SECONDS)))
                try:
                    connection, _ = listener.accept()
                    return connection
                except TimeoutError:
                    if left <= _LISTEN_SECONDS:
                        raise
                    meeting.raise_if_given_up(store)
    if not meeting.await_keys(store, [name], deadline):
        raise TimeoutError("it never came")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.connect("\0" + store.get(name).decode())
    return connection


class _Bytes:
    """Device memory as others' libraries describe it to each other."""

    def __init__(self, address: int, num_bytes: int) -> None:
        # Any: the protocol's dictionary has values of several kinds.
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def tensor_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """The memory as a uint8 tensor that does not own it."""
    tensor = torch.as_tensor(_Bytes(address, num_bytes), device=device)
    assert tensor.data_ptr() == address, "torch copied the memory instead of viewing it"
    return tensor
