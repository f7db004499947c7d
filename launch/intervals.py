"""By how much times may be off, on a command line and in words. No torch.

What `project` and `simulate` share.
"""

from __future__ import annotations

from collections.abc import Mapping

from ppruntime.projection.projector import Origin, ProjectionError


def spread_of(text: str | None) -> Mapping[Origin, float]:
    """Shares by origin from MEASURED,MODELLED,ASSUMED in percent; None: those that the projection
    assumes. Raises ProjectionError for anything else."""
    from ppruntime.launch.project_parts import numbers_of
    from ppruntime.projection.pipeline import SPREAD

    if text is None:
        return SPREAD
    numbers = numbers_of("--spread", text, example="2,15,40")
    if len(numbers) != len(Origin) or max(numbers) >= 100:
        raise ProjectionError(
            f"--spread {text!r} is not MEASURED,MODELLED,ASSUMED in percent under 100; write such "
            "as 2,15,40"
        )
    return dict(zip(Origin, (number / 100 for number in numbers), strict=True))


def spread_words(spread: Mapping[Origin, float]) -> str:
    """What an interval is."""
    parts = ", ".join(f"{origin} by {100 * share:g} %" for origin, share in spread.items())
    return f"intervals: times may be off, {parts}, all the same way (assumed)"
