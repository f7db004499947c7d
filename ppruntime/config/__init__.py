"""TOML files and command-line overrides -> one checked `Config`, or every mistake with its place.

    keys          what a run is made of: start here
    loading       `load`, and a config back as TOML or as flat keys
    reading       collects values and mistakes; `toml_places` finds the lines
    rules         what concerns several keys; `pipeline_rules`, `expert_rules`, `kernel_rules` and
                  `training_rules` are its parts, `rule` says what one is
    errors        what a wrong config looks like to its author
    help          every key with its text

Knows the model's sizes and no torch; nothing below `ppruntime/` sees a config.
"""

from ppruntime.config.errors import ConfigError
from ppruntime.config.keys import Config
from ppruntime.config.loading import check_world_size, digest, dumps, flatten, load
from ppruntime.config.pipeline_rules import one_transport

__all__ = [
    "Config",
    "ConfigError",
    "check_world_size",
    "digest",
    "dumps",
    "flatten",
    "load",
    "one_transport",
]
