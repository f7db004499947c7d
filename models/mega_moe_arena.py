"""The memory of the fused MoE layer that all ranks of an expert group can reach, and its meetings.

One arena per rank, all of one size, serves every layer of the rank, one after another:

    words      where each rank has come to
    error      what a wait of this rank gave up on; 0: nothing
    told       numbers of rows, by rank                           written by peers, read here
    order      pairs by expert, as `moe_layout` lists them        written here, read by peers
    weights    routing weights by pair                            the same
    rows       tokens, or gradients of them, bf16 or E4M3         the same
    scales     of E4M3 rows                                       the same
    values     gradients of routing weights by pair               written by peers, read here
    places     a bf16 row per pair                                the same

What is written before a layer's first meeting, here or by peers, is read after it; places and
values, which peers write after it, are read here after the next. That meeting is also the proof
that they have read: so a region is free again at the layer's second meeting, or at the third where
a pass was run twice, and no other word is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppruntime.models.kernels.mega_moe import LATE_PART, Peers, meet
from ppruntime.models.kernels.mega_moe_counts import Heard, plan, tell
from ppruntime.models.kernels.quantize import GROUP, Quantized
from ppruntime.models.mega_moe_rules import MOST_RANKS, ArenaShape, told_words


class Arena:
    """One rank's arena and its way to the others'.

    `memory` is this rank's, uint8, zeroed before any peer can reach it; `addresses` by rank are
    where this process has them mapped. `close` gives back what the maker holds.
    """

    def __init__(
        self,
        shape: ArenaShape,
        memory: Tensor,
        addresses: list[int],
        rank: int,
        *,
        limit: int,
        ranks: tuple[int, ...] = (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        assert len(memory) >= shape.num_bytes, (len(memory), shape)
        assert len(addresses) <= MOST_RANKS, len(addresses)
        self.shape, self.close = shape, close
        self.ranks = ranks or tuple(range(len(addresses)))
        self._memory, self._epoch = memory, 0
        self.peers = Peers(
            torch.tensor(addresses, dtype=torch.int64).to(memory.device),
            self._region("error", torch.int32, 1),
            rank,
            limit,
        )

    @property
    def error(self) -> Tensor:
        """int32 [1] on the device, see `error_text`."""
        return self.peers.error

    def meet(self, *, arrive: bool = True, wait: bool = True) -> None:
        """On the stream: from here on all ranks have done what they were asked to before it."""
        self._epoch += arrive
        meet(self.peers, self.shape.offset("words"), self._epoch, arrive=arrive, wait=wait)

    @property
    def num_meetings(self) -> int:
        """So far."""
        return self._epoch

    def tell(self, count_E: Tensor, room: int) -> None:
        """On the stream: this rank's rows for each expert and the pool rows it has room for, to all
        ranks, with its error word. They have it after the next meeting, see `plan`."""
        tell(self.peers, count_E, room, told_offset=self.shape.offset("told"))

    def plan(self, num_rows: int) -> Heard:
        """On the stream, after the meeting behind `tell`: this rank's pool, of so many rows."""
        return plan(self.peers, self.told().flatten(), self.shape.num_experts, num_rows)

    def told(self) -> Tensor:
        """int32 [P, E + 2]: what each rank told."""
        ranks, width = self.peers.num_ranks, told_words(self.shape.num_experts)
        return self._region("told", torch.int32, ranks * width).view(ranks, width)

    def order(self, num: int) -> Tensor:
        """int32 [num]: pairs by expert."""
        return self._region("order", torch.int32, num)

    def weights(self, num_tokens: int) -> Tensor:
        """fp32 [N, K]."""
        return self._by_pair("weights", num_tokens)

    def values(self, num_tokens: int) -> Tensor:
        """fp32 [N, K]."""
        return self._by_pair("values", num_tokens)

    def rows(self, num_tokens: int) -> Tensor:
        """bf16 [N, D]."""
        hidden = self.shape.hidden
        return self._region("rows", torch.bfloat16, num_tokens * hidden).view(num_tokens, hidden)

    def fp8_rows(self, num_tokens: int) -> Quantized:
        """E4M3 [N, D] and fp32 scales [N, G], in the same memory as `rows`."""
        hidden = self.shape.hidden
        groups = hidden // GROUP
        data = self._region("rows", torch.float8_e4m3fn, num_tokens * hidden)
        scale = self._region("scales", torch.float32, num_tokens * groups)
        return Quantized(data.view(num_tokens, hidden), scale.view(num_tokens, groups))

    def places(self, num_tokens: int) -> Tensor:
        """bf16 [N K, D]."""
        pairs, hidden = num_tokens * self.shape.per_token, self.shape.hidden
        return self._region("places", torch.bfloat16, pairs * hidden).view(pairs, hidden)

    def _by_pair(self, region: str, num_tokens: int) -> Tensor:
        per_token = self.shape.per_token
        return self._region(region, torch.float32, num_tokens * per_token).view(-1, per_token)

    def _region(self, name: str, dtype: torch.dtype, num: int) -> Tensor:
        start = self.shape.offset(name)
        return self._memory[start : start + num * dtype.itemsize].view(dtype)


def error_text(codes: list[int], ranks: tuple[int, ...]) -> str | None:
    """What went wrong in a group, in a sentence, from all ranks' error words; None: nothing.

    `ranks` are the group's in the world. One text for all who read the same words.
    """
    failed = [(ranks[place], code) for place, code in enumerate(codes) if code]
    if not failed:
        return None
    seen = "; ".join(
        f"rank {rank} waited too long for "
        + ("rows of its own copy kernel" if code == LATE_PART else f"rank {ranks[code - 1]}")
        for rank, code in failed
    )
    return (
        f"the expert group of ranks {list(ranks)} did not meet in a fused MoE layer: {seen}; what "
        "that step computed is void. A rank that was waited for is late or has ended"
    )
