"""`ppruntime bench kernels`: the same training with the readable references and with kernels.

One process a run, four layers at full width (window, both ratios, reuse, an Engram), on the Python
library's text: the references, every kernel in bf16, also FP8 products, and the bf16 kernels once
more from other weights and data. What those two differ by is the noise that the others' distance
from the references is held against.

Runs may be made in parts, one after the other or at once: those asked for are added to what the
record then has of the same training on the same device, and whatever is not there, or was cut by
the limit, is named in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

import torch

from ppruntime.config.help import kernels_left_to_auto
from ppruntime.launch.bench_training import trained_for
from ppruntime.launch.records import write_record

CONFIG = Path(__file__).resolve().parent / "configs" / "v41-proxy-8.toml"
FOUR_LAYERS = (
    "model.num_layers=4",
    "model.compress_ratios=[0,2,1,1]",
    "model.kv_sources=[1,2]",
    "model.index_sources=[1,2]",
    "model.candidate_source=2",
    "model.engram_layers=[1]",
    "model.num_experts=8",
    "pp.size=1",
    "train.force_balanced_routing=false",
    "train.num_micro_batches=1",
    "train.seq_len=2048",
    "data.type=stdlib",
    "optim.warmup_steps=20",
    "ac.mode=none",
    "run.tensorboard=false",
    "run.log_interval=1000",
    "checkpoint.save_last=false",
)
KERNELS = kernels_left_to_auto(but=("linear",))
FP8 = ("kernels.linear=auto", "moe.compute.backend=triton")
REFERENCE, IN_BF16, IN_FP8, OTHER_SEED = "reference", "kernels", "kernels, FP8", "other seed"
RUNS: dict[str, tuple[str, ...]] = {
    REFERENCE: ("kernels.head=chunked",),
    IN_BF16: KERNELS,
    IN_FP8: (*KERNELS, *FP8),
    OTHER_SEED: (*KERNELS, "train.seed=2"),
}
"""Name -> overrides. The reference is what the others are compared with; by how much another seed
differs from the same kernels is the noise. It is theirs, as a step of the references takes most of
a second."""
PARTS = {"reference": REFERENCE, "kernels": IN_BF16, "fp8": IN_FP8, "seed": OTHER_SEED}
"""Their names on a command line."""
WINDOW = 20
"""Steps whose mean loss is one point of a curve."""


@dataclass(frozen=True, slots=True)
class Learned:
    """One run."""

    name: str
    overrides: tuple[str, ...]
    losses: tuple[float, ...]
    """Of every step; fewer than were asked for if the limit was over."""
    step_ms: float
    """Median, on the host's clock."""


def curve(losses: Sequence[float]) -> list[float]:
    """Means of `WINDOW` steps after one another; a rest shorter than that is left out."""
    starts = range(0, len(losses) - WINDOW + 1, WINDOW)
    return [fmean(losses[start : start + WINDOW]) for start in starts]


def apart(run: Learned, other: Learned) -> float | None:
    """The largest distance of the two curves, as far as both go, from the second point on: before,
    both fall. None if they do not go so far."""
    pairs = zip(curve(run.losses), curve(other.losses), strict=False)
    return max([abs(a - b) for a, b in pairs][1:], default=None)


def run(
    *,
    steps: int,
    overrides: Sequence[str],
    config: Path,
    out: Path,
    only: Sequence[str] = tuple(PARTS),
    limit_seconds: float | None = None,
) -> int:
    """Trains, prints a line a run, and writes `out` after every one.

    `only` names runs, which are made in this order; what `out` has of others is kept. With
    `limit_seconds` none is begun after that, and one that runs then is ended.
    Gives 1 if a run did not end well, if the limit cut or left out what was asked for, or if
    kernels in bf16 are farther from the reference than twice the noise, once all three are there.
    """
    start = time.monotonic()
    given = [*overrides, f"--steps {steps}", *(f"--only {name}" for name in only)]
    head: dict[str, object] = {
        "config": [config.name, *overrides],
        "steps": steps,
        "window": WINDOW,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {"torch": str(torch.__version__)},
    }
    own_runs: dict[str, Learned] = {}
    found = _before(out, head)
    is_late = False
    for name in (PARTS[part] for part in only):
        left = None if limit_seconds is None else limit_seconds - (time.monotonic() - start)
        if left is not None and left <= 0:
            print(f"{name}: not run, the limit was over", flush=True)
            is_late = True
            continue
        own = RUNS[name]
        done = trained_for(config, [*overrides, *own, f"train.steps={steps}"], limit_seconds=left)
        if done is None and FP8[0] in own:
            print(f"{name}: left out, see above", flush=True)
            continue
        if done is None:
            return 1
        is_late |= done.was_cut
        losses = tuple(step.loss for step in done.metrics if step.loss is not None)
        if not losses:
            print(f"{name}: the limit was over before its first step", flush=True)
            continue
        own_runs[name] = Learned(
            name, own, losses, median(1e3 * step.step_seconds for step in done.metrics)
        )
        found = _before(out, head) | own_runs  # another process may have written meanwhile
        _write(out, " ".join(["ppruntime bench kernels", *given]), head, found)
        print(_line(found[name], found, steps), flush=True)
    return _judged(out, found, steps) or int(is_late)


def _line(own: Learned, found: dict[str, Learned], steps: int) -> str:
    """What a run is told by."""
    distance = apart(own, found[REFERENCE]) if REFERENCE in found else None
    text = (
        f"{own.name:24}first {own.losses[0]:.4f}  last {WINDOW} {fmean(own.losses[-WINDOW:]):.4f}  "
        f"curve apart by {'?' if distance is None else f'{distance:.4f}'}  "
        f"{own.step_ms:.0f} ms a step"
    )
    return text if len(own.losses) >= steps else f"{text}, cut after {len(own.losses)} steps"


def _judged(out: Path, found: dict[str, Learned], steps: int) -> int:
    """Says how far kernels are from the reference, and gives 1 if that is too far."""
    wanted = (REFERENCE, IN_BF16, OTHER_SEED)
    missing = [name for name in wanted if name in _left(found, steps)]
    if missing:
        print(f"results in {out}; not judged without all steps of: {'; '.join(missing)}")
        return 0
    noise = apart(found[OTHER_SEED], found[IN_BF16])
    distance = apart(found[IN_BF16], found[REFERENCE])
    if noise is None or distance is None:
        print(f"results in {out}; not judged: {steps} steps are less than {2 * WINDOW}")
        return 0
    is_near = distance <= 2 * noise
    print(f"results in {out}; noise {noise:.4f}, kernels within twice of it: {is_near}")
    return int(not is_near)


def _left(found: dict[str, Learned], steps: int) -> list[str]:
    """Runs that are not there, or not to their end."""
    return [name for name in RUNS if name not in found or len(found[name].losses) < steps]


def _before(out: Path, head: dict[str, object]) -> dict[str, Learned]:
    """The runs of an earlier record, if it is of the same training on the same device."""
    if not out.exists():
        return {}
    record = json.loads(out.read_text())
    if any(record.get(key) != value for key, value in head.items()):
        print(f"{out} is of another training or device: its runs are not kept", flush=True)
        return {}
    fields = ("name", "overrides", "losses", "step_ms")
    rows = [Learned(**{field: row[field] for field in fields}) for row in record["runs"]]
    return {row.name: row for row in rows if tuple(row.overrides) == RUNS.get(row.name)}


def _write(out: Path, command: str, head: dict[str, object], found: dict[str, Learned]) -> None:
    steps, reference = head["steps"], found.get(REFERENCE)
    assert isinstance(steps, int)
    rows = [found[name] for name in RUNS if name in found]
    record = {
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **head,
        "left": _left(found, steps),
        "runs": [
            asdict(row) | {"apart": None if reference is None else apart(row, reference)}
            for row in rows
        ],
    }
    write_record(out, record)
