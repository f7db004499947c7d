"""From summed gradients to the next weights: update rules, learning rate, norm and clipping.

Everything here works on one rank's parameters, given as a mapping from the model's full parameter
names ("layers.3.attn.q_a.weight") to tensors; `clip` and `muon_optimizer` talk to other ranks. May
import torch and `models.update_rules`, no other room. Start reading at `adamw`.

adamw           AdamW, which parameters decay, an optimizer's state by name
sign_sgd        SignSGD, without state; sign_sgd_kernel: its pass on a GPU
muon            Muon's update of whole matrices; sinkhorn: the balanced update of tables
muon_optimizer  both, and AdamW for the rest, over parameters that lie over ranks;
                matrix_owners: who orthogonalises what, and the way there
learning_rate   the schedule
clip            the global norm and scaling by it
"""

from ppruntime.optim.adamw import decays, make_adamw, set_lr, state_tensors
from ppruntime.optim.clip import clip_, global_norm
from ppruntime.optim.learning_rate import lr_at

__all__ = ["clip_", "decays", "global_norm", "lr_at", "make_adamw", "set_lr", "state_tensors"]
