"""Orders that are pure functions of a key: no state to save, no files, the same on every machine.

NumPy's own generators may change their permutations between versions, so these are written out.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from ppruntime.data.token_file import Integers

_FEISTEL_ROUNDS = 6


def key(*parts: object) -> int:
    """64 bits that depend on every part: a name, a seed, an epoch."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def mix(values: Integers | NDArray[np.uint64], with_key: int) -> NDArray[np.uint64]:
    """A hash of each value, one to one for a given key. Steele, Lea and Flood 2014 (SplitMix64)."""
    x = np.atleast_1d(values).astype(np.uint64) + np.array([with_key], np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permutation(size: int, with_key: int) -> Integers:
    """0 .. size - 1 in an order that depends on the key. Takes time and memory for `size`
    numbers."""
    return np.argsort(mix(np.arange(size), with_key), kind="stable")


def permute(values: Integers, size: int, with_key: int) -> Integers:
    """Where a permutation of 0 .. size - 1 sends `values`, without making the permutation.

    A Feistel network on the next power of four, walked until it falls below `size` (Black and
    Rogaway 2002, cycle walking): less than four steps on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    half = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    round_keys = [key("round", with_key, r) for r in range(_FEISTEL_ROUNDS)]
    result = values.astype(np.uint64)
    outside = np.ones(len(result), np.bool_)
    while outside.any():
        left, right = result[outside] >> shift, result[outside] & half
        for round_key in round_keys:
            left, right = right, left ^ (mix(right, round_key) & half)
        result[outside] = (left << shift) | right
        outside = result >= size
    return result.astype(np.int64)
