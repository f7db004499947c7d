"""What the tests of the FP8 experts share. Import it before any kernel."""

from __future__ import annotations

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def random_routing(num_tokens, per_token, num_experts, *, seed=0, unrouted=0.0, experts=None):
    """Distinct experts per token, drawn from `experts`; a share of pairs is routed nowhere."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor(list(range(num_experts) if experts is None else experts))
    order = torch.rand(num_tokens, len(choice), generator=generator).argsort(-1)
    experts_NK = choice[order[:, :per_token]].view(num_tokens, per_token)
    nowhere = torch.rand(num_tokens, per_token, generator=generator) < unrouted
    return experts_NK.masked_fill(nowhere, -1).to(DEVICE)


def distance(a, b):
    """Relative distance in the Frobenius norm, in fp64."""
    a, b = a.double(), b.double()
    return ((a - b).norm() / b.norm()).item()


def values(fp8):
    """FP8 as fp32: the interpreter may give -0 the bytes of 0."""
    return fp8.float()


def needed(columns, layout):
    """Columns or tiles without the blocks that no expert needs: those are not written."""
    blocks = int(layout.start_E1[-1]) // 128
    return type(columns)(columns.data[:blocks], columns.scale[:blocks])


def routings(num_experts):
    """For the Gluon kernels' tests: `num_experts` at least 4."""
    return {
        "idle experts": random_routing(60, 2, num_experts, experts=[0, 1, 3]),
        "all to one expert": torch.full((700, 1), 1, device=DEVICE),
        "one token": random_routing(1, 2, num_experts),
        "ragged": random_routing(400, 2, num_experts, unrouted=0.3),
    }
