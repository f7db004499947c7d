"""Small units with every kind of boundary tensor, for tests of stage and executor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.carry import Carry, MicroBatch
from ppruntime.models.linear import Linear

WIDTH, VOCAB, STREAMS = 8, 11, 2


class Embed(nn.Module):
    """Streams from ids; the mix starts as a constant that needs no gradient, as in V4.1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCAB, WIDTH))

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        x_BTD = self.table[batch.ids]
        mix = torch.zeros(*batch.ids.shape, STREAMS)
        mix[..., 0] = 1
        return carry._replace(streams=torch.stack([x_BTD] * STREAMS, dim=2), mix=mix)


class Half(nn.Module):
    """A sublayer over all streams. A source makes `kv` and `slots`, a consumer reads both."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.source, self.consumer = index % 6 == 1, index % 6 > 1
        self.up, self.down = Linear(WIDTH, 2 * WIDTH), Linear(2 * WIDTH, WIDTH)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.mixer = Linear(WIDTH, STREAMS)
        nn.init.normal_(self.up.weight, std=0.3)
        nn.init.normal_(self.down.weight, std=0.3)
        nn.init.normal_(self.mixer.weight, std=0.3)
        if self.source:
            self.key = Linear(WIDTH, WIDTH)
            nn.init.normal_(self.key.weight, std=0.3)

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        assert carry.mix is not None
        x_BTD = (carry.streams * carry.mix.unsqueeze(-1)).sum(2) * self.norm
        x_BTD = x_BTD.to(self.up.weight.dtype)
        if self.source:
            slots = ((batch.ids + 1) % batch.ids.shape[1]).int().unsqueeze(-1)
            carry = carry._replace(kv=self.key(x_BTD), slots=slots)
        elif self.consumer:
            assert carry.kv is not None
            assert carry.slots is not None
            index = carry.slots.long().expand(-1, -1, WIDTH)
            x_BTD = x_BTD + torch.gather(carry.kv, 1, index)
        y_BTD: Tensor = self.down(functional.silu(self.up(x_BTD)))
        mix = torch.sigmoid(self.mixer(x_BTD))
        balance = 0.01 * mix.mean()
        previous = carry.balance_loss
        return carry._replace(
            streams=carry.streams + y_BTD.unsqueeze(2),
            mix=mix,
            balance_loss=balance if previous is None else previous + balance,
        )


class Head(nn.Module):
    """Cross-entropy summed over labels."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Linear(WIDTH, VOCAB)
        nn.init.normal_(self.out.weight, std=0.3)

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        assert carry.streams is not None
        assert carry.mix is not None
        x_BTD = (carry.streams * carry.mix.unsqueeze(-1)).sum(2)
        logits = self.out(x_BTD).flatten(0, 1)
        loss = functional.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
        return Carry(loss=loss, balance_loss=carry.balance_loss)


def toy_units(num_halves: int, seed: int) -> list[nn.Module]:
    """The whole model, the same for one seed."""
    torch.manual_seed(seed)
    return [Embed(), *(Half(i) for i in range(num_halves)), Head()]


def live_after(num_units: int) -> list[tuple[str, ...]]:
    """Fields alive after each unit: kv and slots from their source to the last unit before a new
    one or the head."""
    live: list[tuple[str, ...]] = [("streams", "mix")]
    for index in range(num_units - 2):
        shared = index % 6 >= 1 and index % 6 < 5 and index < num_units - 3
        live.append(("streams", "mix", "kv", "slots") if shared else ("streams", "mix"))
    return [*live, ()]


def micro_batches(num: int, batch: int, tokens: int, seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(VOCAB, (batch, tokens + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        positions = torch.arange(tokens).expand(batch, tokens).contiguous()
        made.append(MicroBatch(ids[:, :-1].contiguous(), labels, positions))
    return made
