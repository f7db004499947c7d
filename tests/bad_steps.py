"""Steps whose gradients are made not finite, on one rank alone."""

from __future__ import annotations

from collections.abc import Collection


def spoil(rank: int, steps: Collection[int], of_rank: int) -> None:
    """In this process, seeds the losses of `steps`, counted from 0, with infinity on `of_rank`: its
    own gradients are not finite, those of other ranks only by what they get from it. Whoever calls
    it again says it anew."""
    from ppruntime.trainer import Trainer

    plain = getattr(Trainer.step, "plain", Trainer.step)

    def step(trainer, index, *args):  # type: ignore[no-untyped-def]
        reset = trainer._reset_stages

        def reset_badly(*, loss_seed: float) -> None:
            reset(loss_seed=float("inf") if index in steps and rank == of_rank else loss_seed)

        trainer._reset_stages = reset_badly
        try:
            return plain(trainer, index, *args)
        finally:
            del trainer._reset_stages

    step.plain = plain  # type: ignore[attr-defined]
    Trainer.step = step  # type: ignore[method-assign]
