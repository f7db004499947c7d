"""Steps whose loss or gradient norm is not a finite number: stop there, or skip the update.

A step is judged once its gradients are reduced, by what all ranks know alike. A skipped step leaves
weights, routing biases and the optimizer as they were; data and learning rate go on. Pure, no
torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppruntime.config.keys import Config


class NonFiniteError(ArithmeticError):
    """A loss or gradient norm is not a finite number. The weights are those of the step before,
    unless they are updated in the backward; nothing of the step is saved."""


@dataclass(slots=True)
class Skips:
    """Steps whose update was skipped, in this run and its earlier starts."""

    total: int = 0
    in_a_row: int = 0
    """Up to the last step; 0 if that was updated."""

    def note(self, config: Config, index: int, loss: float, norm: float) -> None:
        """Step `index`, counted from 0, is not finite on some rank. Raises NonFiniteError where
        the step may not be skipped; else counts it."""
        fault = config.fault
        if fault.nonfinite == "stop":
            weights = f"the weights are still those of step {index}"
            if config.optim.apply_in_backward:
                weights = (
                    "the weights have moved in the backward already and are not saved, go on from"
                    " the last checkpoint"
                )
            raise NonFiniteError(
                f"step {index + 1}: {_what(loss, norm)}; {weights}, a lower optim.lr may help"
            )
        if self.in_a_row >= fault.nonfinite_max:
            raise NonFiniteError(
                f"step {index + 1}: {_what(loss, norm)}, as in {_steps(self.in_a_row)} before it,"
                f" skipped; fault.nonfinite_max = {fault.nonfinite_max} allows no more."
                f" The weights are still those of step {index - self.in_a_row}, a lower optim.lr"
                " may help"
            )
        self.total += 1
        self.in_a_row += 1


def is_finite(loss: float, norm: float) -> bool:
    """Whether a step may change weights."""
    return math.isfinite(loss) and math.isfinite(norm)


def _what(loss: float, norm: float) -> str:
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return "loss or gradient norm is not finite on another rank"


def _steps(number: int) -> str:
    return "the step" if number == 1 else f"the {number} steps"
