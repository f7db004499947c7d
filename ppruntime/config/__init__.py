"""TOML files and command-line overrides -> one checked `Config`, or every mistake with its place.

Read `keys` for what a run is made of, then `loading`. `rules` and its neighbours hold what concerns
several keys at once, `reading` collects values and mistakes, `errors` words them, `help` prints the
keys. Knows the model's sizes and no torch; nothing below `ppruntime/` sees a config.
"""

from ppruntime.config.errors import ConfigError
from ppruntime.config.keys import Config
from ppruntime.config.loading import check_world_size, digest, dumps, flatten, load

__all__ = ["Config", "ConfigError", "check_world_size", "digest", "dumps", "flatten", "load"]
