"""A whole small model from one seed: units with uneven weights, token data, one forward.

Shared by the tests of the models and by the comparisons with other implementations, which have to
start from the very same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ppruntime.models.carry import IGNORED_LABEL, Carry, MicroBatch
from ppruntime.models.dims import ModelDims, unit_specs
from ppruntime.models.engram_hash import token_map
from ppruntime.models.init import fill_normal, init_parameters
from ppruntime.models.moe import HERE, MoEOptions
from ppruntime.models.units import Unit, build_unit


def build_units(
    dims: ModelDims, seed: int, dtype: torch.dtype = torch.float32, *, moe: MoEOptions = HERE
) -> list[Unit]:
    """All units, weights N(0, 0.05), what starts at a constant moved off it by N(0, 0.1).

    So no gate is half open by chance and no expert is preferred by none.
    """
    units = []
    for spec in unit_specs(dims):
        unit = build_unit(dims, spec, moe=moe, dtype=dtype)
        init_parameters(unit, spec.name, seed, std=0.05)
        _move_constants(unit, spec.name, seed)
        units.append(unit)
    return units


def _move_constants(unit: nn.Module, name: str, seed: int) -> None:
    biases = [(n, b) for n, b in unit.named_buffers() if n.endswith("router.bias")]
    with torch.no_grad():
        for local, tensor in itertools.chain(unit.named_parameters(), biases):
            if tensor.std(correction=0) == 0:
                noise = torch.empty_like(tensor)
                fill_normal(noise, f"{name}.{local} moved", seed, 0.1)
                tensor += noise


def copy_units(dims: ModelDims, units: Sequence[Unit], dtype: torch.dtype) -> list[Unit]:
    """The same weights in another dtype."""
    copies = [build_unit(dims, unit.spec, dtype=dtype) for unit in units]
    for copied, unit in zip(copies, units, strict=True):
        copied.load_state_dict(unit.state_dict())
    return copies


def random_batch(
    dims: ModelDims, seed: int, rows: Sequence[Sequence[int]], num_masked: int = 0
) -> MicroBatch:
    """Random tokens; `rows` has the document lengths of each row. Labels are the next tokens of the
    same document; the first `num_masked` of them are ignored."""
    generator = torch.Generator().manual_seed(seed)
    seq_len = sum(rows[0])
    ids = torch.randint(0, dims.vocab_size, (len(rows), seq_len), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = IGNORED_LABEL
    labels[:, :-1][positions[:, 1:] == 0] = IGNORED_LABEL
    labels.view(-1)[:num_masked] = IGNORED_LABEL
    return MicroBatch(ids, labels, positions)


def run(units: Sequence[nn.Module], batch: MicroBatch) -> Carry:
    """The carry after all of `units`."""
    carry = Carry()
    for unit in units:
        carry = unit(carry, batch)
    return carry


def run_to_logits(units: Sequence[nn.Module], batch: MicroBatch) -> Tensor:
    """Logits [B, T, vocabulary] of the whole model."""
    return units[-1].logits(run(units[:-1], batch))


def mean_loss(units: Sequence[nn.Module], batch: MicroBatch) -> Tensor:
    """Cross-entropy per valid label."""
    return run(units, batch).loss / (batch.labels != IGNORED_LABEL).sum()


def named_grads(units: Sequence[Unit]) -> dict[str, Tensor]:
    """Full name -> gradient, of all parameters that have one."""
    return {
        f"{unit.spec.name}.{name}": parameter.grad
        for unit in units
        for name, parameter in unit.named_parameters()
        if parameter.grad is not None
    }


def byte_symbols() -> list[str]:
    """Printable stand-ins of the 256 bytes, as byte-level BPE vocabularies write them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols = {byte: chr(byte) for byte in printable}
    symbols |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in symbols)}
    return [symbols[byte] for byte in range(256)]


def byte_token_map() -> tuple[int, ...]:
    """Engram's classes of a vocabulary of the 256 bytes."""
    texts = [bytes([byte]).decode("utf-8", errors="replace") for byte in range(256)]
    return token_map(texts, byte_symbols())


def set_token_map(units: Sequence[nn.Module], classes: Sequence[int]) -> None:
    """Fills the token map of every Engram."""
    for unit in units:
        for name, buffer in unit.named_buffers():
            if name.endswith("token_map"):
                buffer.copy_(torch.tensor(classes))
