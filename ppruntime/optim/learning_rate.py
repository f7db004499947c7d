"""The learning rate as a pure function of the step: a checkpoint need not hold any of it."""

from __future__ import annotations

import math


def lr_at(step: int, *, peak: float, final: float, num_warmup_steps: int, num_steps: int) -> float:
    """The learning rate of step `step`, counted from 1: linear warm-up, then a cosine.

    The rate grows by peak / num_warmup_steps a step and is `peak` at step `num_warmup_steps`; from
    there half a cosine takes it to `final` at step `num_steps`, where it stays. Raises ValueError
    for a step below 1. Source: Loshchilov and Hutter 2017 (SGDR), equation 5, without restarts.
    """
    if step < 1:
        raise ValueError(f"step is {step}; steps are counted from 1")
    if step <= num_warmup_steps:
        return peak * (step / num_warmup_steps)
    if step >= num_steps:
        return final
    done = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * done))
