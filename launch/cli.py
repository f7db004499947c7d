"""The command `ppruntime`. Subcommands load what they need when they run; none loads torch here."""

from __future__ import annotations

import os
import select
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import App, CycloptsError, Parameter

from ppruntime import __version__
from ppruntime.launch.run_files import files_and_overrides
from ppruntime.launch.whole_numbers import MaybeWhole

app = App(
    name="ppruntime",
    version=__version__,
    help_format="plaintext",  # the others load a markup parser, which takes longer than all else
    help="""Pipeline-parallel training of DeepSeek-V4.1-Flash and V4-Flash.

    A run is a TOML file. Look at it with: ppruntime plan launch/configs/tiny.toml

    Start it with: torchrun --nproc-per-node 4 -m ppruntime.launch.train launch/configs/tiny.toml
    """,
)
data_app = App(name="data", help="Make and check token files.")
app.command(data_app)
app.command(
    "ppruntime.launch.schedule_cli:app",
    name="schedule",
    help="Show, compare, check and search orders of work.",
)
app.command(
    "ppruntime.launch.bench_cli:app",
    name="bench",
    help="Measure: orders, transports, layers, experts.",
)
app.command(
    "ppruntime.launch.project_cli:project",
    name="project",
    help="Say how long a training takes and what that rests on.",
)
app.command(
    "ppruntime.launch.simulate_cli:simulate",
    name="simulate",
    help="Play a step with what slows real clusters down, and say where the time goes.",
)
app.command(
    "ppruntime.launch.calibrate_cli:calibrate",
    name="calibrate",
    help="Time a model's units, transfers and optimizer on this machine.",
)
app.command(
    "ppruntime.launch.emulate_cli:emulate",
    name="emulate",
    help="Run some stages of a deeper pipeline for real and write what they take.",
)
app.command(
    "ppruntime.launch.validate_cli:validate",
    name="validate",
    help="Hold predictions, written first, against what runs then take.",
)
app.command(
    "ppruntime.launch.validate_run:validate_run",
    name="validate-run",
    help="Predict a real pipeline's step from another run of it, then run it.",
)
app.command(
    "ppruntime.launch.headline_cli:headline",
    name="headline",
    help="Project V4.1-Flash from the kernels' records of today, beside published rows.",
)

Argument: TypeAlias = Annotated[
    str, Parameter(help="TOML files, later ones on top, and section.key=value texts.")
]


@app.command
def train(*arguments: Argument) -> int:
    """Trains in this process, or says how to start the processes that the run needs."""
    from ppruntime.config import load
    from ppruntime.launch import train as entry_point

    config = load(*files_and_overrides(arguments))
    if config.world_size == 1:
        return entry_point.main(arguments)
    started = "the run needs more than this one process; nothing was started"
    print(f"{config.world_size} processes: {started}. Use:\n", file=sys.stderr)
    module = ["-m", "ppruntime.launch.train", *arguments]
    print(shlex.join(["torchrun", "--nproc-per-node", str(config.world_size), *module]))
    return 2


_MEMORY_GB, _RESERVED_GB, _PEAK_FLOPS = 139.0, 10.0, 989e12


@app.command
def plan(
    *arguments: Argument,
    json: bool = False,
    ledger: bool = False,
    check: Path | None = None,
    search: bool = False,
    calibration: Path | None = None,
    benches: Path | None = None,
    link: str | None = None,
    memory_gb: float = _MEMORY_GB,
    reserved_gb: float = _RESERVED_GB,
    host_gb_per_s: float = 0.0,
    transport: str | None = None,
    peak_flops: float = _PEAK_FLOPS,
) -> int:
    """Prints what each stage would hold and send, without starting anything.

    Parameters
    ----------
    json
        Print one JSON object instead of a table.
    ledger
        Print every rank's memory by rows, at its peak, and the op of that peak.
    check
        Directory of a run: print its memory as predicted and as measured. Takes no config.
    search
        Look for the best plan within memory: cuts, order, warm-up, what is recomputed or offloaded;
        without a file for the shipped v41-flash-pp16.toml.
    calibration
        With --search: times of the units; by default from the kernel records in docs/bench.
    benches
        With --search: folder with kernel records.
    link
        With --search: the calibration's link that hops go over.
    memory_gb
        With --search: what a GPU has, in 1e9 bytes.
    reserved_gb
        With --search: of that for what the memory ledger does not have: context, communication's
        own buffers, workspaces, the allocator's slack.
    host_gb_per_s
        With --search: to the host and back at once; 0 offloads nothing.
    transport
        With --search: whose slow-down of compute the steps are with; by default put's with kernel
        records, with a calibration the run's pp.transport if it has that.
    peak_flops
        With --search: FLOP/s of one GPU that MFU is a share of.
    """
    from ppruntime.config import ConfigError, load

    of_search = {
        "--calibration": calibration is not None,
        "--benches": benches is not None,
        "--link": link is not None,
        "--memory-gb": memory_gb != _MEMORY_GB,
        "--reserved-gb": reserved_gb != _RESERVED_GB,
        "--host-gb-per-s": host_gb_per_s != 0.0,
        "--transport": transport is not None,
        "--peak-flops": peak_flops != _PEAK_FLOPS,
    }
    if not search and (given := [name for name, is_given in of_search.items() if is_given]):
        raise ConfigError(f"{', '.join(given)} is for --search, which is not there; add it")
    if check is not None:
        if arguments:
            raise ConfigError(f"--check reads the run's own config; leave out {arguments[0]}")
        from ppruntime.ledger_check import run_check_text

        print(run_check_text(check))
        return 0
    files, overrides = files_and_overrides(arguments)
    if search and not files:
        from ppruntime.launch.projected_job import PLAN_OF_RECORD

        files = [str(PLAN_OF_RECORD)]
    config = load(files, overrides)
    if ledger:
        from ppruntime.ledger import ledger_text

        print(ledger_text(config))
        return 0
    if search:
        from ppruntime.launch.plan_search import search as search_plans

        return search_plans(
            config,
            calibration=calibration,
            benches=benches,
            link=link,
            memory_gb=memory_gb,
            reserved_gb=reserved_gb,
            host_gb_per_s=host_gb_per_s,
            transport=transport,
            peak_flops=peak_flops,
            json=json,
        )
    from ppruntime.plan_report import plan_json, plan_text

    print(plan_json(config) if json else plan_text(config))
    return 0


@app.command
def config(*arguments: Argument) -> int:
    """Prints the config that the files and overrides give, every key of it, as TOML."""
    from ppruntime.config import dumps, load

    print(dumps(load(*files_and_overrides(arguments))), end="")
    return 0


@app.command
def keys(*names: str) -> int:
    """Prints what config keys mean, what they take and their defaults.

    Parameters
    ----------
    names
        Keys such as pp.size, or sections such as pp; by default all.
    """
    from ppruntime.config.errors import ConfigError, did_you_mean
    from ppruntime.config.help import key_helps

    helps = key_helps()
    for name in names:
        if not any(help.name == name or help.name.startswith(f"{name}.") for help in helps):
            hint = did_you_mean(name, [help.name for help in helps])
            raise ConfigError(f"{name} is neither a key nor a section{hint}")
    for help in helps:
        if not names or any(f"{help.name}.".startswith(f"{name}.") for name in names):
            print(help)
    return 0


@data_app.command
def build(
    *paths: str,
    out: str,
    tokenizer: str = "bytes",
    corpus: str | None = None,
    eod: str | None = None,
    force: bool = False,
) -> int:
    """Writes PREFIX.bin and PREFIX.idx from texts.

    A folder stands for its files. A .jsonl file holds a document a line:

        {"text": "..."}, or {"prompt": "...", "completion": "..."} of which only the
        completion is learnt.

    Parameters
    ----------
    paths
        Text files, .jsonl files and folders.
    out
        Prefix of the files to write.
    tokenizer
        "bytes", or the path of a tokenizer.json.
    corpus
        "stdlib": the Python standard library's sources, instead of paths.
    eod
        Token, or its id, that ends each document.
    force
        Replace files that exist.
    """
    from ppruntime.data.corpus import build as build_token_file
    from ppruntime.data.corpus import file_texts, stdlib_texts
    from ppruntime.data.token_file import DataError
    from ppruntime.data.tokenizer import load_tokenizer

    if corpus not in (None, "stdlib"):
        raise DataError(f"there is no corpus {corpus!r}; leave --corpus out or use stdlib")
    if bool(paths) == (corpus is not None):
        raise DataError("nothing to read, or two things; give either paths or --corpus stdlib")
    build_token_file(
        out,
        file_texts(paths) if paths else stdlib_texts(),
        load_tokenizer(tokenizer),
        eod=eod,
        if_exists="replace" if force else "refuse",
    )
    return check(out)


@data_app.command
def check(prefix: str, *, vocab_size: MaybeWhole = None) -> int:
    """Reads all of a token file and says what is in it, or what is wrong with it.

    Parameters
    ----------
    prefix
        The token file, without .bin.
    vocab_size
        The model's; by default the one that the file was built for.
    """
    from ppruntime.data.token_file import TokenFile

    file = TokenFile.open(prefix)
    file.check_content(vocab_size)
    print(file.summary())
    return 0


@app.command
def version() -> int:
    """Prints the versions of ppruntime, Python and the packages that it works with."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    print(f"ppruntime {__version__}\npython {sys.version.split()[0]}")
    for package in ("torch", "triton", "numpy", "msgspec", "safetensors", "nvidia-nccl-cu13"):
        try:
            print(f"{package} {installed(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand and gives its exit code: 0 done, 2 wrong arguments or config, 16 data.

    What a user did wrong is printed once, without a traceback. Who stops reading the output, as
    `head` does, ends the command quietly, with the code that a shell gives for SIGPIPE.
    """
    try:
        code = app(
            sys.argv[1:] if arguments is None else list(arguments),
            result_action="return_value",
            exit_on_error=False,
            print_error=False,
        )
        sys.stdout.flush()  # here, since Python's own flush at the end would print a traceback
    except BrokenPipeError:
        if not _reader_has_left():
            raise  # another pipe than our output's: a rank's connection, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except CycloptsError as error:
        print(_wrong_words(error), file=sys.stderr)
        return 2
    except ValueError as error:
        exit_code = _exit_code(error)
        if exit_code is None:
            raise
        print(error, file=sys.stderr)
        return exit_code
    return code if isinstance(code, int) else 0


def _reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _wrong_words(error: CycloptsError) -> str:
    """What the parser could not read, in one sentence, and where it is said what it takes."""
    words = " ".join(str(error).split()).removesuffix(".")
    named = error.argument.name if error.argument is not None else ""
    if named and named not in words:  # of lists and choices the parser leaves the option out
        words = f"{named}: {words}"
    command = shlex.join(["ppruntime", *(error.command_chain or ()), "--help"])
    return f"{words}; `{command}` says what it takes"


def _exit_code(error: ValueError) -> int | None:
    """The exit code for what a user did wrong; None for what we did wrong."""
    from ppruntime.config.errors import ConfigError
    from ppruntime.projection.projector import ProjectionError
    from ppruntime.schedules.ops import ScheduleError

    if isinstance(error, ConfigError | ProjectionError | ScheduleError):
        return 2
    from ppruntime.data.token_file import (
        DataError,  # loads numpy, which config errors need not wait for
    )

    return 16 if isinstance(error, DataError) else None


if __name__ == "__main__":
    sys.exit(main())
