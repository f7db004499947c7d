"""One rank of a training run: `torchrun --nproc-per-node 4 -m ppruntime.launch.train RUN.toml`.

Arguments: TOML files, later ones on top, then `section.key=value`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ppruntime.config import ConfigError, load


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the files and overrides say. Gives the exit code: 0 done, 2 wrong configuration."""
    arguments = sys.argv[1:] if arguments is None else arguments
    paths = [argument for argument in arguments if "=" not in argument]
    overrides = [argument for argument in arguments if "=" in argument]
    try:
        config = load(paths, overrides)
    except ConfigError as error:
        return refuse(error)

    from ppruntime.trainer import run  # torch is loaded here, after the configuration is known good

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
