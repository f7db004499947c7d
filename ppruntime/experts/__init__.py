"""From the config to who computes experts, and what brings tokens to them.

    options       the backend of the products, and which one "auto" is
    dispatch      what moves rows: `exchange`, `deep_ep` or the fused layer's `arena`
    exchange      torch's all-to-all over an expert group
    deep_ep       the package of that name
    hosts         whose ranks have to be on one host
    arena         memory of the fused layer, mapped by every rank of the group
    arena_bytes   its size, without torch

The layer itself is in `models/`, which knows no group of processes; here are the groups. This file
imports nothing.
"""
