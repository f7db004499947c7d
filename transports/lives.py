"""Which host this is, and whether another process of it still lives, without a connection to it.

A process id alone can be given away again, so a process is named by its id and its start time.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

_STATE, _START_TIME = 2, 21  # fields of /proc/PID/stat, from 0; the second is the name in brackets
_DEAD_STATES = frozenset("ZX")


@dataclass(frozen=True, slots=True)
class Life:
    """One process of this host."""

    pid: int
    start_time: int

    def __str__(self) -> str:
        return f"{self.pid}/{self.start_time}"

    @property
    def has_ended(self) -> bool:
        """The process is gone, or is only a zombie that its parent has not looked at."""
        fields = _stat(self.pid)
        return (
            fields is None
            or fields[_STATE] in _DEAD_STATES
            or int(fields[_START_TIME]) != self.start_time
        )


def host_name() -> str:
    """This host by a name unique over the machines: the boot id tells apart hosts, or virtual
    machines, that bear one name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    boot = boot_id.read_text().strip() if boot_id.is_file() else "unknown"
    return f"{socket.gethostname()}/{boot}"


def life_of(pid: int) -> Life | None:
    """The process with this id, None if it is not to be seen (other system, other namespace)."""
    fields = _stat(pid)
    return None if fields is None else Life(pid, int(fields[_START_TIME]))


def parse_life(text: str) -> Life | None:
    """What `str(life)` gave on another rank; None unless that very process is seen from here."""
    pid, _, start_time = text.partition("/")
    if not (pid.isdigit() and start_time.isdigit()):
        return None
    life = Life(int(pid), int(start_time))
    return None if life.has_ended else life


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name may hold blanks and brackets: what follows its last bracket is regular.
    head, _, tail = text.rpartition(")")
    return [head.split(" ")[0], head.partition("(")[2], *tail.split()]
