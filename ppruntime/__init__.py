"""A pipeline-parallel training runtime for DeepSeek-V4.1-Flash and V4-Flash.

The rooms, from the top; each imports downwards only:

    launch       command line and training entry point, `launch/configs/*.toml`
    ppruntime    plan, stage, executor, trainer, checkpoint, metrics; in it config, data, experts,
                 optim, projection
    schedules    which rank runs which op in which order: pure Python, no torch
    transports   how a boundary moves between two ranks: tensors and peers, no ops
    models       the layers, as an ordered list of half-layer units: no ranks

Read `config/keys.py` for what a run is made of, then `launch/train.py`, `ppruntime/trainer.py` and
`ppruntime/executor.py` for what happens in one.

This file imports nothing: `import ppruntime.schedules` must not load torch.
"""

__version__ = "0.1.0"
