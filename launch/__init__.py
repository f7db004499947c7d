"""How runs start: `cli.py` is the command `ppruntime`, `train.py` one rank of a run under torchrun.

`configs/` holds whole runs as TOML. This room imports everything below it, and nothing imports it.
Modules here load what they need inside the function that needs it: help and wrong arguments have to
answer in half a second, and `import torch` alone takes several.
"""
