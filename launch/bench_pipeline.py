"""Bench of whole pipeline steps, without an optimizer: `ppruntime bench pipeline --out FILE`.

Orders x transports on one model, in one run. A case's record has the step and its cycle (the time
of one micro-batch in the middle of the step), what the timeline makes of the run's own op times,
where each rank's time went, and digests of losses and gradients, which no transport may change.
The case `none` moves nothing: what a cycle takes beyond its is what transfers cost, hidden or not.
`torch` is torch.distributed.pipelining on the same stages. `+pairs` behind a transport overlaps the
halves of an order's pairs. `--fused-wgrads 1,2` runs all of it by how many micro-batches' weight
gradients FP8 experts add in one launch. Experts may lie over ranks (`parallel.ep`): then rank 0's
pipeline is the one that is told of.

Starts a process per rank itself; under torchrun it is one of them. The record is written after
every case, so a limit loses nothing. Without GPUs it runs over gloo, which tests use.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ppruntime.launch import cuda_environment

os.environ.update(cuda_environment.left_out())

import torch
import torch.distributed as dist
from msgspec.structs import replace as replaced

from ppruntime.build import build_stage, warm_up_stage
from ppruntime.config import Config, ConfigError, load
from ppruntime.config.keys import PAIR_SCHEDULES
from ppruntime.connect import Outline, connect, make_executor, make_outline
from ppruntime.data.batches import open_data
from ppruntime.engram_tables import EngramLookups
from ppruntime.experts.dispatch import open_dispatchers
from ppruntime.experts.options import choose_experts
from ppruntime.gemm_budget import GemmBudget, with_gemm_budget
from ppruntime.lanes import Lanes, OneLane, open_lanes
from ppruntime.launch.command_line import command_line
from ppruntime.launch.pipeline_bars import bars, figures, line
from ppruntime.launch.pipeline_variants import Variant, parsed_kind
from ppruntime.launch.records import run_python, write_record
from ppruntime.launch.run_digests import gradient_digest, loss_digest
from ppruntime.launch.run_files import add_run, files_and_overrides
from ppruntime.launch.stand_ins import (
    Contents,
    HollowTransport,
    ObservedTransport,
    PacedTransport,
    Pacer,
    hollow_channels,
)
from ppruntime.launch.torch_pipeline import TorchPipeline
from ppruntime.linear_options import choose_linears
from ppruntime.messages import gather_bytes
from ppruntime.models.carry import MicroBatch
from ppruntime.models.dispatch import Dispatcher, check_waits
from ppruntime.models.gemm_sms import GemmSms
from ppruntime.profiling import (
    MeasuredStep,
    align_clocks,
    gather_step,
)
from ppruntime.ranks import Layout, Ranks, join, leave
from ppruntime.sleep_rig import start_together
from ppruntime.stage import Stage
from ppruntime.transports import open_transport
from ppruntime.transports.base import Transport, TransportError
from ppruntime.wrap import hold_gradients, reduce_grads

_WARM_UP_STEPS = 1
_TORCH_ORDERS = ("1f1b", "dualpipe_v")
_TIMEOUT_SECONDS = 60.0
_GRACE_SECONDS = 60.0  # of a case that was begun in time


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one. Rank 0 prints a line a case and writes the record."""
    args = _parsed(arguments)
    config = load(args.files, [*args.overrides, f"pp.schedule={args.orders.split(',')[0]}"])
    if "WORLD_SIZE" not in os.environ:
        given = sys.argv[1:] if arguments is None else list(arguments)
        command = ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(config.world_size), "-m", __spec__.name, *given]
        return run_python(command)
    faulthandler.dump_traceback_later(args.limit_seconds + _GRACE_SECONDS, exit=True)
    use_cuda = torch.cuda.is_available() and config.run.device != "cpu"
    layout = Layout(config.pp.size, config.parallel.dp, config.parallel.ep)
    ranks = join(layout, use_cuda=use_cuda, timeout_seconds=300)
    try:
        _Bench(args, config, ranks).run()
    finally:
        faulthandler.cancel_dump_traceback_later()
    leave()
    return 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ppruntime bench pipeline", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add_run(parser, "launch/configs/v41-proxy-8.toml")
    add("--out", required=True, type=Path, help="JSON file to write")
    add("--orders", default="1f1b,async_1f1b,1f1b_w,dualpipe_v")
    add(
        "--transports",
        default="copy_engine,put,nccl",
        help="kinds; nccl/4 is nccl with 4 thread blocks, nccl@0 with receives that start when they"
        " are waited for (its recv_lead is 0), nccl/4@0 both; copy_engine+pairs overlaps pairs, and"
        " copy_engine+pairs:88:44 gives the products of their forwards 88 multiprocessors, of their"
        " backwards 44; the case none runs too",
    )
    add("--micro-batches", default="16", help="of every order")
    add("--more-micro-batches", default="8,32", help="of the first order too")
    add("--steps", type=int, default=3, help="measured per case")
    add("--limit-seconds", type=float, default=360.0, help="no case is begun after this")
    add(
        "--fused-wgrads",
        default="",
        help="values of moe.compute.fused_wgrad_micro_batches, such as 1,2: all orders with each;"
        " without it the config's",
    )
    add("--no-torch", action="store_true", help="leave torch.distributed.pipelining out")
    add("--no-none", action="store_true", help="leave the case that moves nothing out")
    add("--nccl-library", help="a libnccl.so.2 of 2.30 or newer, for put")
    add("--stand-in", action="store_true", help="transfers as slow as over InfiniBand instead")
    add("--slow-ms", type=float, default=6.5, help="how long one transfer of the stand-in takes")
    args = parser.parse_intermixed_args(arguments)
    if args.stand_in and "+pairs" in args.transports:
        parser.error("--stand-in compares transports; leave +pairs out, or --stand-in")
    args.fused_wgrads = [int(n) for n in args.fused_wgrads.split(",") if n] or [None]
    if len(args.fused_wgrads) > 1 and args.stand_in:
        parser.error("--stand-in compares transports; leave --fused-wgrads out, or --stand-in")
    args.files, args.overrides = files_and_overrides(args.run)
    args.files = args.files or [str(Path(__file__).parent / "configs" / "v41-proxy-8.toml")]
    return args


class _Bench:
    """One rank of the bench. All do the same calls in the same order."""

    def __init__(self, args: argparse.Namespace, config: Config, ranks: Ranks) -> None:
        self.args, self.config, self.ranks = args, config, ranks
        self.start = time.monotonic()
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.stages: dict[int, Stage] = {}
        self.dispatchers: dict[int, Dispatcher] = {}
        self.gemm_sms = GemmSms()
        self.lanes: dict[tuple[int, ...], Lanes] = {}
        self.warm: set[tuple[int, int] | None] = set()
        self.built: object = None
        self.fused_wgrads: int | None = None
        self.contents: Contents = {}

    def run(self) -> None:
        """All cases, those of one placement together: its stages are built once. torch last: what
        it may leave hanging costs no case of ours."""
        orders, num = self.args.orders.split(","), int(self.args.micro_batches)
        if self.args.stand_in:
            for order in orders:
                self._enter(order, num)
                self._run_variants(self._stand_ins())
            self._write(complete=True)
            return
        for num_fused in self.args.fused_wgrads:
            self.fused_wgrads = num_fused
            self._run_orders(orders, num)
        # torch's runtime knows nothing of ranks that share experts.
        no_torch = self.args.no_torch or self.config.parallel.ep > 1
        theirs = [] if no_torch else [o for o in orders if o in _TORCH_ORDERS]
        for order in reversed(theirs):  # the last one's stages are there
            self._enter(order, num)
            self._case("torch", self._torch_case)
        self._write(complete=True)

    def _run_orders(self, orders: Sequence[str], num: int) -> None:
        more = [int(m) for m in self.args.more_micro_batches.split(",") if m]
        for order in orders:
            self._enter(order, num)
            self._run_variants(self._variants())
            if order == orders[0]:
                for m in more:
                    self._enter(order, m)
                    self._run_variants(self._variants())

    # --- what runs ---

    def _enter(self, order: str, num_micro_batches: int) -> None:
        self.keys = [f"pp.schedule={order}", f"train.num_micro_batches={num_micro_batches}"]
        if self.fused_wgrads is not None:
            self.keys.append(f"moe.compute.fused_wgrad_micro_batches={self.fused_wgrads}")
        self.config = self._config(())
        self.outline = make_outline(self.config)
        if self._is_late():
            return
        wanted = (self.outline.order.computations.stage_to_rank, self.fused_wgrads)
        if self.built != wanted:
            self.built, self.contents = wanted, {}
            self.stages.clear()
            self.dispatchers.clear()
            gc.collect()
            self._build()
        data = open_data(self.config)
        self.batches = [
            MicroBatch(
                *(t.to(self.ranks.device) for t in data.micro_batch(0, m, self.ranks.data_rank)[:3])
            )
            for m in range(num_micro_batches)
        ]

    def _config(self, more: Sequence[str]) -> Config:
        return load(self.args.files, [*self.args.overrides, *self.keys, *more])

    def _config_of(self, variant: Variant) -> Config:
        config = self.config if variant.pairs is None else self._config(variant.pairs.keys)
        return with_gemm_budget(config, self.ranks.device)

    def _build(self) -> None:
        config = with_gemm_budget(self.config, self.ranks.device)
        own = [s for s in self.outline.plan if s.rank == self.ranks.pp_rank]
        # Each stage its own, as overlapping pairs need them: in all cases, to be comparable.
        apart = replaced(config, pp=replaced(config.pp, overlap_pairs=True))
        self.dispatchers = open_dispatchers(
            apart,
            self.ranks,
            [s.index for s in own],
            timeout_seconds=_TIMEOUT_SECONDS,
            gemm_sms=self.gemm_sms,
        )
        experts, linears = choose_experts(config), choose_linears(config)
        self.stages = {
            s.index: build_stage(
                config,
                s,
                self.ranks,
                experts=experts,
                dispatcher=self.dispatchers[s.index],
                linears=linears,
                draw_on_device=True,
                gemm_sms=self.gemm_sms,
            )
            for s in own
        }
        self._warm_up(OneLane(), GemmBudget(config, self.ranks.device, sms=self.gemm_sms))
        self.warm = {None}

    def _warm_up(self, lanes: Lanes, budget: GemmBudget) -> None:
        train = self.config.train
        for index, stage in self.stages.items():
            warm_up_stage(
                stage,
                self.outline.received(index),
                self.ranks,
                batch=train.micro_batch_size,
                seq_len=train.seq_len,
                lanes=lanes,
                budget=budget,
            )

    def _lanes(self, *, overlap: bool) -> Lanes:
        """Streams are made once: what the allocator holds of one would be of no use to another."""
        own = tuple(sorted(self.stages))
        if not overlap:
            return OneLane()
        if own not in self.lanes:
            self.lanes[own] = open_lanes(own, self.ranks.device, overlap=True)
        return self.lanes[own]

    def _variants(self) -> list[Variant]:
        variants = [parsed_kind(kind) for kind in self.args.transports.split(",")]
        if self.config.pp.schedule not in PAIR_SCHEDULES:
            variants = [variant for variant in variants if variant.pairs is None]
        return [replace(v, options=self._plain(v.kind, **v.options).options) for v in variants]

    def _plain(self, kind: str, **more: Any) -> Variant:
        library = self.args.nccl_library
        options = {"nccl_library": library} if kind == "put" and library else {}
        return Variant(kind, kind, options | more)

    def _stand_ins(self) -> list[Variant]:
        """nccl held to as many thread blocks as bring a transfer nearest to `--slow-ms`, the others
        paced to the same time; and nccl with all its blocks, paced, as it is over a network."""
        kinds = self.args.transports.split(",")
        if self.ranks.device.type != "cuda":
            return [self._plain(kind) for kind in kinds]
        wanted = self.args.slow_ms / 1e3
        few = {
            ctas: self._transfer_seconds(self._plain("nccl", transport_ctas=ctas))
            for ctas in (1, 2, 4)
        }
        ctas = min(few, key=lambda c: abs(few[c] - wanted))
        self.pacer = Pacer(self.ranks.device)
        variants = [Variant(f"nccl {ctas} CTAs", "nccl", {"transport_ctas": ctas})]
        for kind in kinds:
            plain = self._plain(kind)
            try:
                own = self._transfer_seconds(plain)
            except TransportError as error:  # on all ranks alike
                self.notes.append(f"{kind} was left out: {error}")
                continue
            hold = max(0.0, few[ctas] - own)
            variants.append(Variant(f"{kind} paced", kind, plain.options, hold))
            self.notes.append(f"{kind}: {own * 1e3:.2f} ms by itself, {hold * 1e3:.2f} ms held")
        self.notes += [f"nccl, {c} CTAs: {s * 1e3:.2f} ms" for c, s in few.items()]
        self.notes.append(f"held by copies over PCIe, {self.pacer.bytes_per_second / 1e9:.1f} GB/s")
        return variants

    def _transfer_seconds(self, variant: Variant) -> float:
        """The longest of the start-up test's transfers, over all ranks."""
        transport: Any = self._open(variant, self.outline)
        # Where a V turns inside a rank, local carries that channel beside it.
        carriers = getattr(transport, "_transports", (transport,))
        times = [
            time.seconds
            for carrier in carriers
            if (found := getattr(carrier, "start_up", None)) is not None
            for time in found.times
        ]
        transport.close()
        longest = torch.tensor([max(times, default=0.0)], dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def _run_variants(self, variants: Sequence[Variant]) -> None:
        for variant in variants:
            self._case(variant.full_name, partial(self._our_case, variant))
        if self.args.no_none:
            return
        # After a real one, whose messages it hands out.
        for pairs in dict.fromkeys(variant.pairs for variant in variants):
            alike = [variant for variant in variants if variant.pairs == pairs]
            quickest = next((v for v in alike if v.kind == "copy_engine"), alike[0])
            still = quickest.standing_still()
            self._case(still.full_name, partial(self._our_case, still))

    def _is_late(self) -> bool:
        """Whether the limit is over, for all ranks alike."""
        late = torch.tensor([time.monotonic() - self.start > self.args.limit_seconds])
        late = late.to(torch.int32)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        return bool(late.item())

    def _case(self, name: str, run: Callable[[], dict[str, Any]]) -> None:
        if self._is_late():
            fused = "" if self.fused_wgrads is None else f", n = {self.fused_wgrads}"
            self.notes.append(
                f"{self.config.pp.schedule}{fused} {name}: not run, the limit was over"
            )
            self._write(complete=False)
            return
        record: dict[str, Any] = {
            "order": self.config.pp.schedule,
            "transport": name,
            "num_micro_batches": self.config.train.num_micro_batches,
            "fused_wgrads": self.fused_wgrads,
            "boundary_bytes": [b.num_bytes for b in self.outline.boundaries],
        }
        self.records.append(record | run())
        self._write(complete=False)
        if self.ranks.rank == 0:
            print(line(self.records[-1]), flush=True)

    # --- one case ---

    def _open(self, variant: Variant, outline: Outline) -> Transport:
        return connect(
            outline,
            self.ranks,
            [outline.order.lowered],
            kind=variant.kind,
            timeout_seconds=_TIMEOUT_SECONDS,
            options=variant.options,
        )

    def _our_case(self, variant: Variant) -> dict[str, Any]:
        try:
            config = self._config_of(variant)
        except ConfigError as error:
            return {"refused": str(error)}
        outline, ranks = make_outline(config), self.ranks
        order, overlap = outline.order, bool(outline.order.pairs)
        lanes = self._lanes(overlap=overlap)
        budget = GemmBudget(config, ranks.device, sms=self.gemm_sms)
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # what the case before left lies in memory of its streams
            if config.pp.pair_gemm_sms not in self.warm:
                self._warm_up(lanes, budget)
                self.warm.add(config.pp.pair_gemm_sms)
        is_hollow = variant.name == "none"
        if is_hollow and not self.contents and ranks.layout.pp > 1:
            return {"refused": "no transport ran before it whose messages it could hand out"}
        try:
            if is_hollow:
                inner = self._open_hollow(variant, outline)
            else:
                inner = self._open(variant, outline)
        except TransportError as error:
            return {"refused": str(error)}
        if variant.hold_seconds:
            inner = PacedTransport(
                inner,
                outline.channels,
                ranks.pp_rank,
                ranks.device,
                seconds=variant.hold_seconds,
                hold=self.pacer.hold,
            )
        transport = ObservedTransport(inner)
        lookups = self._lookups()
        executor = make_executor(
            outline,
            order.lowered,
            ranks,
            self.stages,
            transport,
            lookups=lookups,
            lanes=lanes,
            budget=budget,
        )
        offset = align_clocks(ranks.pipeline_group)
        steps, host, walls = list[MeasuredStep](), list[float](), list[float]()
        digests, norm = list[dict[str, str]](), 0.0
        last, peak = _WARM_UP_STEPS + self.args.steps - 1, 0
        for step in range(last + 1):
            if step == _WARM_UP_STEPS and ranks.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            begin, took = self._timed_step(lambda: executor.run(self.batches))
            if step == last and ranks.device.type == "cuda":  # a digest takes memory too
                peak = torch.cuda.max_memory_allocated()
            enqueued = torch.tensor([transport.enqueued_at - begin], dtype=torch.float64)
            dist.all_reduce(enqueued, op=dist.ReduceOp.MAX)
            if step in (0, last):
                losses = loss_digest(ranks, self.stages)
                gradients, norm = gradient_digest(ranks, self.stages)
                digests.append({"loss": losses, "gradient": gradients})
            _clear_gradients(self.stages)
            measured = gather_step(
                order.computations,
                executor.op_times(),
                offset=offset,
                group=ranks.pipeline_group,
                pairs_overlap=lanes.overlap,
                turns=self.config.moe.compute.turns,
            )
            if step >= _WARM_UP_STEPS:
                steps.append(measured)
                host.append(float(enqueued))
                walls.append(took)
        if not self.contents:
            self.contents = transport.contents
        transport.close()
        return figures(steps, walls, host) | {
            "hold_ms": variant.hold_seconds * 1e3,
            **{
                f"{which}{what}_digest": "" if is_hollow else of[what]
                for which, of in (("first_", digests[0]), ("", digests[-1]))
                for what in ("loss", "gradient")
            },
            "gradient_norm": norm,
            "peak_bytes": self._peaks(peak),
        }

    def _peaks(self, own: int) -> list[int]:
        """Of this pipeline's ranks, what tensors took in the measured steps; without GPUs none."""
        if self.ranks.device.type != "cuda":
            return []
        parts = gather_bytes(str(own).encode(), self.ranks.pipeline_group)
        return [int(part) for part in parts]

    def _lookups(self) -> EngramLookups:
        """Rows of a step's micro-batches are announced when it begins, as in a run."""
        units = {index: stage.units for index, stage in self.stages.items()}
        return EngramLookups(units, ahead=self.config.engram.lookups_ahead)

    def _open_hollow(self, variant: Variant, outline: Outline) -> Transport:
        channels = hollow_channels(outline.channels)
        inner = open_transport(
            variant.kind,
            channels,
            self.ranks.pp_rank,
            device=self.ranks.device,
            timeout_seconds=_TIMEOUT_SECONDS,
            store=self.ranks.pipeline_store(),
            **variant.options,
        )
        return HollowTransport(inner, outline.channels, self.contents)

    def _torch_case(self) -> dict[str, Any]:
        schedule = self.outline.order.computations
        pipeline = TorchPipeline(schedule, self.stages, self.outline.boundaries, self.ranks)
        walls, digest, norm = [], "", 0.0
        for step in range(_WARM_UP_STEPS + self.args.steps):
            _, took = self._timed_step(lambda: pipeline.step(self.batches))
            if step == _WARM_UP_STEPS + self.args.steps - 1:
                digest, norm = gradient_digest(self.ranks, self.stages)
            _clear_gradients(self.stages)
            if step >= _WARM_UP_STEPS:
                walls.append(took)
        return {
            "step_seconds": walls,
            "step_seconds_median": statistics.median(walls),
            "torch_gradient_digest": digest,  # its sums may come in another order
            "gradient_norm": norm,
        }

    def _timed_step(self, run: Callable[[], None]) -> tuple[float, float]:
        """When this rank began, and how long the slowest rank took until its device was done;
        gradients are reduced and left there."""
        for stage in self.stages.values():
            one = torch.ones((), device=self.ranks.device)
            stage.reset(loss_seed=one / len(self.batches), balance_seed=one)
            hold_gradients(list(stage.units))
        _settle(self.ranks)
        begin = time.perf_counter()
        run()
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        check_waits(dict.fromkeys(self.dispatchers.values()))
        for stage in self.stages.values():
            stage.flush_weight_grads()
            reduce_grads(list(stage.units), self.ranks.data_group)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        return begin, float(took)

    # --- the record ---

    def _write(self, *, complete: bool) -> None:
        if self.ranks.rank != 0:
            return
        on_gpu = self.ranks.device.type == "cuda"
        found = bars(self.records)
        record = {
            "command": command_line("pipeline"),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "versions": _versions(on_gpu, self.args.nccl_library),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self.start, 1),
            "complete": complete,
            "model": self.config.model.name,
            "seq_len": self.config.train.seq_len,
            "overrides": list(self.args.overrides),
            "notes": self.notes,
            "bars": [asdict(bar) for bar in found],
            "cases": self.records,
        }
        write_record(self.args.out, record)
        if complete:
            print("\n".join(map(str, [*found, *self.notes])), flush=True)


def _settle(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
    start_together()  # a barrier would let ranks of one host go milliseconds apart


def _clear_gradients(stages: Mapping[int, Stage]) -> None:
    for stage in stages.values():
        stage.units.zero_grad(set_to_none=True)


def _versions(on_gpu: bool, library: str | None) -> dict[str, str]:
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if on_gpu:
        from ppruntime.launch.transport_record import library_versions

        versions |= library_versions(library)
    return versions


if __name__ == "__main__":
    sys.exit(main())
