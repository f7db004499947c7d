"""Rows between the processes over which a layer's experts or an Engram table lie: fills
`models.dispatch.Exchange`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from ppruntime.models.dispatch import Finish


class DispatchError(RuntimeError):
    """A rank of a group did not take part in an exchange. Names both and the exchange."""


@dataclass(frozen=True, slots=True)
class ProcessExchange:
    """Point to point, so that a failure says who failed. The process group is used for nothing
    else, and has the limit for one exchange as its timeout."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    """Ranks in the world, by rank in the group."""
    what: str = "expert group"
    """What an error calls them."""
    stage: int | None = None
    """The one that it serves, where each has its own; None: any."""

    @classmethod
    def of(
        cls, group: dist.ProcessGroup, what: str = "expert group", *, stage: int | None = None
    ) -> ProcessExchange:
        """Over the ranks of `group`."""
        return cls(group, tuple(dist.get_process_group_ranks(group)), what, stage)

    @property
    def name(self) -> str:
        ranks = ",".join(map(str, self.ranks))
        return ranks if self.stage is None else f"{ranks} of stage {self.stage}"

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    def begin(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], what: str) -> Finish:
        """Empty tensors do not travel: both ends know that."""
        own, num_ranks = self.rank, self.num_ranks
        incoming[own].copy_(outgoing[own])
        ops: list[dist.P2POp] = []
        peers: list[int] = []
        for shift in range(1, num_ranks):
            # Every rank begins with another peer, so that no link has all of the traffic at once.
            for act, tensors, peer in (
                (dist.irecv, incoming, (own - shift) % num_ranks),
                (dist.isend, outgoing, (own + shift) % num_ranks),
            ):
                if tensors[peer].numel():
                    ops.append(dist.P2POp(act, tensors[peer], group=self.group, group_peer=peer))
                    peers.append(peer)

        def lost(num_done: int, error: RuntimeError) -> DispatchError:
            return DispatchError(
                f"rank {self.ranks[peers[num_done]]} of the {self.what} of ranks"
                f" {list(self.ranks)} did not take part in exchanging {what}: it is late or has"
                f" ended ({_first_line(error)})"
            )

        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise lost(0, error) from error

        def finish() -> None:
            num_done = 0
            try:
                # NCCL makes one work of all, whose wait is the stream's and cannot fail here.
                for work in works:
                    work.wait()
                    num_done += 1
                ops.clear()  # until here they keep the tensors
            except RuntimeError as error:
                raise lost(num_done, error) from error

        return finish


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
