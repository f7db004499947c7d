"""Layers that keep copies of their weights between updates and gradients between launches."""

from __future__ import annotations

from torch import nn

from ppruntime.models.linear import Deferrable


class WeightVersion:
    """Counts how often weights changed. A stage owns one and its layers share it; after every
    optimizer step, or after loading weights, its owner calls `advance`."""

    def __init__(self) -> None:
        self.number = 0

    def advance(self) -> None:
        """Makes every copy of the weights stale."""
        self.number += 1


class WeightCopies(Deferrable):
    """A layer that computes with copies of its weights.

    `version`: shared by the stage's layers (`set_weight_version`); None: copies are made in every
    forward, which is right but slow.
    """

    version: WeightVersion | None = None

    def renew_copies(self) -> None:
        """Makes the copies of this version now, if there is one, instead of in the next forward."""

    def flush_weight_grads(self) -> None:
        """Adds the weight gradients that still wait for others to be added with."""


def set_weight_version(unit: nn.Module, version: WeightVersion | None) -> None:
    """Hands one version to every layer inside `unit` that keeps copies of its weights."""
    for module in unit.modules():
        if isinstance(module, WeightCopies):
            module.version = version


def renew_copies(unit: nn.Module) -> None:
    """Makes all copies of weights inside `unit` that its next forward would make."""
    for module in unit.modules():
        if isinstance(module, WeightCopies):
            module.renew_copies()


def flush_weight_grads(unit: nn.Module) -> None:
    """After a stage's last weight gradient of a step, before gradients are reduced."""
    for module in unit.modules():
        if isinstance(module, WeightCopies):
            module.flush_weight_grads()
