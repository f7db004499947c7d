"""Arenas over the ranks of a host, opened for real but for the driver: ranks are threads, device
memory is files in memory that each rank maps for itself."""

import threading
from types import SimpleNamespace

import pytest
import simulated_cuda
import torch
from torch._C._distributed_c10d import HashStore

from ppruntime.experts import arena as expert_arena
from ppruntime.models.mega_moe_rules import ArenaShape
from ppruntime.transports.agree import DisagreementError
from ppruntime.transports.base import TransportError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plays a driver on the CPU")
SHAPE = ArenaShape(most_tokens=4, per_token=2, num_experts=6, hidden=128)
GROUP = (2, 3, 5)
"""Ranks in the world."""


@pytest.fixture
def opened(monkeypatch):
    """Opens an arena in a thread per rank; gives them, or what each raised, in rank order."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(expert_arena, "Driver", lambda device: SimpleNamespace())
    monkeypatch.setattr(expert_arena, "allocate", simulated_cuda._allocate)
    monkeypatch.setattr(expert_arena, "tensor_at", simulated_cuda._tensor_at)
    monkeypatch.setattr(
        expert_arena, "map_peer", lambda driver, device, fd, size: simulated_cuda._Memory(fd, size)
    )

    def open_all(shapes, *, timeout_seconds=60.0):
        store, results = HashStore(), {}

        def open_one(rank, shape):
            try:
                results[rank] = expert_arena.open_arena(
                    shape,
                    GROUP,
                    rank,
                    torch.device("cpu", 0),
                    store,
                    timeout_seconds=timeout_seconds,
                )
            except (TransportError, DisagreementError) as error:
                results[rank] = error

        threads = [threading.Thread(target=open_one, args=item) for item in shapes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in shapes]

    return open_all


def test_every_rank_reads_and_writes_the_arenas_of_all(opened):
    arenas = opened(dict.fromkeys(GROUP, SHAPE))
    bases = torch.stack([arena.peers.bases_P for arena in arenas])
    assert len(set(bases.flatten().tolist())) == 9  # each has a mapping of its own
    for place, arena in enumerate(arenas):
        assert arena.peers.rank == place
        assert arena.ranks == GROUP
        assert not arena.places(4).any()
        arena.weights(4).fill_(place + 1)
    offset = SHAPE.offset("weights")
    for reader in bases.tolist():
        for place, base in enumerate(reader):
            there = simulated_cuda._tensor_at(base + offset, 4 * 8, torch.device("cpu"))
            assert (there.view(torch.float32) == place + 1).all()


def test_ranks_that_would_map_different_sizes_are_told_so_alike(opened):
    other = ArenaShape(most_tokens=8, per_token=2, num_experts=6, hidden=128)
    errors = opened({2: SHAPE, 3: other, 5: SHAPE})
    assert all(isinstance(error, DisagreementError) for error in errors)
    (text,) = {str(error) for error in errors}
    assert "the arena's bytes" in text
    assert "on ranks 2, 5" in text


def test_a_rank_that_does_not_come_is_named_at_the_limit(opened):
    for error in opened({2: SHAPE, 5: SHAPE}, timeout_seconds=0.5):
        assert isinstance(error, TransportError)
        assert "rank 3 did not" in str(error)
