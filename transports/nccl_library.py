"""Which libnccl `nccl` and `put` use: where to look for one, and how new it has to be.

torch 2.11 links NCCL 2.28.9, which has no put. Another libnccl works beside it: one is loaded by
path and asked for its own version, as torch only knows which one it was built with.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ppruntime.transports.base import TransportError
from ppruntime.transports.nccl_api import Nccl, version_text


@dataclass(frozen=True, slots=True)
class Need:
    """What a kind of transport needs of NCCL, and what to do where that is missing."""

    kind: str
    min_version: int
    prefers_torchs_own: bool
    remedy: str


FOR_PUT: Final = Need(
    "put",
    # Puts stage their signal on the device. 2.29 copied it from pageable host memory.
    min_version=23000,
    prefers_torchs_own=False,
    remedy="set pp.nccl_library to a libnccl.so.2 of 2.30 or newer (package"
    ' "nvidia-nccl-cu13>=2.30"), or set pp.transport = "nccl"',
)
FOR_SEND_RECV: Final = Need(
    "nccl",
    # Several communicators can be aborted together.
    min_version=22200,
    prefers_torchs_own=True,
    remedy='install a torch with NCCL 2.22 or newer, or set pp.transport = "copy_engine"',
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A library that may be used: what names it, and where it is (None if there is none)."""

    source: Literal["pp.nccl_library", "the installed nvidia-nccl package", "torch's own"]
    path: str | None


def candidates(need: Need, nccl_library: str | None = None) -> tuple[Candidate, ...]:
    """Where to look, in this order. A path that the user gave is the only one."""
    if nccl_library is not None:
        return (Candidate("pp.nccl_library", nccl_library),)
    package = Candidate("the installed nvidia-nccl package", _installed_library())
    torchs = Candidate("torch's own", _loaded_library())
    return (torchs, package) if need.prefers_torchs_own else (package, torchs)


def load(need: Need, nccl_library: str | None = None) -> Nccl:
    """The first candidate that is new enough. Raises TransportError naming every version found."""
    found: list[tuple[str, int]] = []
    for candidate in candidates(need, nccl_library):
        if candidate.path is None:
            continue
        where = f"{candidate.source}: {candidate.path}"
        try:
            nccl = Nccl(candidate.path, where)
        except OSError as error:
            raise TransportError(
                f"{need.kind} cannot load NCCL from {where}: {error}; {need.remedy}"
            ) from error
        except AttributeError as error:
            raise TransportError(f"{where} is not NCCL: {error}; {need.remedy}") from error
        if nccl.version >= need.min_version:
            return nccl
        found.append((where, nccl.version))
    raise TransportError(too_old(need, found))


def too_old(need: Need, found: Sequence[tuple[str, int]]) -> str:
    """Why none of the libraries found (where, version code) will do, and the remedy."""
    listed = ", ".join(f"{version_text(version)} ({where})" for where, version in found)
    least = version_text(need.min_version)
    return f"{need.kind} needs NCCL >= {least}, found {listed or 'none'}; {need.remedy}"


def _installed_library() -> str | None:
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        path = Path(folder) / "lib" / "libnccl.so.2"
        if path.is_file():
            return str(path)
    return None


def _loaded_library() -> str | None:
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    return "libnccl.so.2"
