"""Knobs that save memory, alone and in pairs, on the tiny model: the bits of a run without."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from memory_knobs import (
    BF16,
    IN_BACKWARD,
    MASTERS,
    OFFLOAD,
    ORDERS,
    PACED,
    RECOMPUTED,
    SIGNS,
    a_step_of_each,
)

CASES = {
    "": ORDERS["1f1b"],
    "offload": (*OFFLOAD, *ORDERS["1f1b"]),
    "offload, paced": (*PACED, *ORDERS["1f1b_w"]),
    "offload, paced, V": (*PACED, *ORDERS["DualPipeV"]),
    "offload, every second": (*PACED, "pp.offload_every=2", *ORDERS["1f1b_w"]),
    "offload, recompute": (*PACED, *RECOMPUTED, *ORDERS["1f1b"]),
    # Signs alone, and with everything that goes with them: the second has the bits of the first.
    "sign": (*SIGNS, *ORDERS["1f1b"]),
    "sign, in backward, offload": (*SIGNS, *IN_BACKWARD, *PACED, *ORDERS["1f1b_w"]),
    # In bf16 there are masters apart from the weights, and bits depend on the cut.
    "bf16": (*BF16, *ORDERS["1f1b"]),
    "bf16, masters": (*BF16, *MASTERS, *ORDERS["1f1b"]),
    "bf16, masters, offload": (*BF16, *MASTERS, *OFFLOAD, *ORDERS["1f1b_w"]),
    "bf16, sign": (*BF16, *SIGNS, *ORDERS["1f1b"]),
    "bf16, sign, masters, in backward": (
        *(*BF16, *SIGNS, *IN_BACKWARD, *MASTERS, *ORDERS["1f1b_w"]),
    ),
}
"""Name -> overrides. The first words of a name say which other case has the same bits."""


@pytest.mark.long
def test_knobs_alone_and_in_pairs_have_the_bits_of_a_run_without(run_ranks):
    for rank, found in enumerate(run_ranks(2, a_step_of_each, CASES, timeout_seconds=400)):
        assert found["sign"][1] != found[""][1]
        for name, (told, weights, host_bytes) in found.items():
            alone = found[", ".join(word for word in ("bf16", "sign") if word in name)]
            assert told == alone[0], (rank, name)
            if "V" not in name:  # which places units otherwise
                assert weights == alone[1], (rank, name)
            if "masters" in name:
                assert host_bytes > 0, name
            if rank == 0 and "offload" in name:
                assert host_bytes > 0, name


KNOBS = {
    "offload": OFFLOAD,
    "paced": PACED,
    "every second": (*PACED, "pp.offload_every=2"),
    "full": RECOMPUTED,
    "full_moe": ("ac.mode=full_moe",),
    "matmul": ("ac.mode=matmul",),
    "masters": MASTERS,
    "deferred": ORDERS["1f1b_w"],
    "in backward": IN_BACKWARD,
}
"""By name; knobs of one family exclude each other."""
_FAMILIES = (("offload", "paced", "every second"), ("full", "full_moe", "matmul"))


def pairs_of_knobs(seed: int, number: int) -> list[tuple[str, str]]:
    """So many pairs, in which each knob is at least once if there is room."""
    fits = [
        pair
        for pair in combinations(KNOBS, 2)
        if not any(set(pair) <= set(family) for family in _FAMILIES)
    ]
    Random(seed).shuffle(fits)
    chosen: list[tuple[str, str]] = []
    for name in KNOBS:
        if not any(name in pair for pair in chosen):
            chosen.append(next(p for p in fits if name in p))
    return list(dict.fromkeys([*chosen, *fits]))[:number]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("dp", "ep"), [(2, 1), (1, 2)])
def test_pairs_of_knobs_have_the_bits_of_a_run_without_on_four_ranks(dp, ep, run_ranks):
    cases = {"off": ORDERS["1f1b"], "off, signs": (*SIGNS, *ORDERS["1f1b"])}
    alike = {}
    for pair in pairs_of_knobs(seed=2 * dp + ep, number=9):
        name, signs = " + ".join(pair), "in backward" in pair
        overrides = [word for knob in pair for word in KNOBS[knob]]
        order = () if "deferred" in pair else ORDERS["1f1b"]
        cases[name] = (*(SIGNS if signs else ()), *order, *overrides)
        alike[name] = "off, signs" if signs else "off"
    print(sorted(alike))
    outcomes = run_ranks(4, a_step_of_each, cases, 2, False, dp, ep, timeout_seconds=800)
    for rank, found in enumerate(outcomes):
        assert found["off"][1] != found["off, signs"][1]
        for name, other in alike.items():
            assert found[name][:2] == found[other][:2], (rank, name)
