"""Knobs that save memory, alone and in pairs, on the tiny model: the bits of a run without."""

from __future__ import annotations

import pytest
from memory_knobs import (
    BF16,
    IN_BACKWARD,
    KNOBS,
    MASTERS,
    OFFLOAD,
    ORDERS,
    PACED,
    RECOMPUTED,
    SIGNS,
    a_step_of_each,
    pairs_of_knobs,
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
