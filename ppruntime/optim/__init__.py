"""From summed gradients to the next weights: AdamW, learning rate, global norm and clipping.

Everything here works on one rank's parameters, given as a mapping from the model's full parameter
names ("layers.3.attn.q_a.weight") to tensors; only `clip` talks to other ranks. May import torch
and no other room. Start reading at `adamw`.
"""

from ppruntime.optim.adamw import decays, make_adamw, set_lr, state_tensors
from ppruntime.optim.clip import clip_, global_norm
from ppruntime.optim.learning_rate import lr_at

__all__ = ["clip_", "decays", "global_norm", "lr_at", "make_adamw", "set_lr", "state_tensors"]
