"""One rank of a training run: `torchrun --nproc-per-node 4 -m ppruntime.launch.train RUN.toml`.

Arguments: TOML files, later ones on top, then `section.key=value`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from ppruntime.config import ConfigError, load
from ppruntime.launch import cuda_environment
from ppruntime.launch.run_files import files_and_overrides

_HEAD_START_SECONDS = 5
"""torchrun ends all ranks as soon as one has failed. Where all fail alike, rank 0, which tells the
user, goes first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains as the files and overrides say. Gives the exit code: 0 done, 2 wrong configuration,
    others as in `run_dir.ExitCode`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    is_first = os.environ.get("RANK", "0") == "0"
    code = _train(arguments, is_first=is_first)
    if code and not is_first:
        time.sleep(_HEAD_START_SECONDS)
    return code


def _train(arguments: Sequence[str], *, is_first: bool) -> int:
    try:
        config = load(*files_and_overrides(arguments))
    except ConfigError as error:
        if is_first:
            print(error, file=sys.stderr, flush=True)
        return 2

    os.environ.update(cuda_environment.left_out_for(config.pp.transport_names))
    from ppruntime.session import run  # loads torch: only for a configuration that can run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
