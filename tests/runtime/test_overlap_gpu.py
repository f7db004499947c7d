"""Pairs whose halves run at once, on GPUs: they do, nobody reads what another lane has overwritten,
and whole runs keep every bit."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch
from small_runs import checkpoint_digest, steps_on_gpus

from ppruntime.channels import make_channels
from ppruntime.clocks import CudaClock
from ppruntime.executor import Executor
from ppruntime.lanes import StreamLanes, open_lanes
from ppruntime.schedules import make
from ppruntime.schedules.counts import slots_held
from ppruntime.schedules.ops import COMPUTE, Pair, parse_op
from ppruntime.schedules.passes import add_frees, add_transfers
from ppruntime.transports import open_transport
from ppruntime.transports.base import Boundary, TensorSpec


def on_one_gpu(test):
    """A test that needs a GPU."""
    there = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.gpu(there(test))


def on_two_gpus(test):
    """A test that needs two."""
    there = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    return pytest.mark.multi_gpu(there(test))


CYCLES = 2_000_000
"""Of a kernel that only waits: about a millisecond."""
SIZE = 1 << 20


class SleepyStage:
    """Waits on the device, on one multiprocessor, and counts what it reads that is not what was
    written, on the device."""

    def __init__(self, index, cycles):
        self.index, self.cycles, self.in_flight, self.waiting = index, cycles, {}, set()
        self.num_wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    @property
    def num_in_flight(self):
        return len(self.in_flight) + len(self.waiting)

    def forward(self, m, received, batch):
        del batch
        self._look(received, self._number(m, self.index - 1))
        torch.cuda._sleep(self.cycles())
        kept, out = (self._made(m) for _ in range(2))
        self.in_flight[m] = received, kept
        return (out,)

    def backward(self, m, grads):
        received, kept = self.in_flight.pop(m)
        scratch = self._made(m)
        torch.cuda._sleep(self.cycles())
        self._look([*received], self._number(m, self.index - 1))
        self._look([kept, scratch], self._number(m, self.index))
        self._look(grads, -self._number(m, self.index + 1))
        return (-self._made(m),)

    def backward_input(self, m, grads):
        self.waiting.add(m)
        return self.backward(m, grads)

    def weight_grads(self, m):
        self.waiting.remove(m)
        torch.cuda._sleep(self.cycles())

    def _number(self, m, stage):
        return float(100 * m + stage + 1)

    def _made(self, m):
        return torch.full((SIZE,), self._number(m, self.index), device="cuda")

    def _look(self, tensors, wanted):
        for tensor in tensors:
            self.num_wrong += (tensor != wanted).sum()


def run_steps(cycles, *, num_micro_batches=8, num_steps=2):
    """Steps of a whole DualPipeV on one rank; the last one's op times, its pairs, and how many
    numbers were not what they had to be."""
    device = torch.device("cuda", torch.cuda.current_device())
    schedule = make("dualpipe_v", 1, num_micro_batches)
    slots = slots_held(schedule)
    order = add_frees(add_transfers(schedule, slots=slots))
    boundary = Boundary((TensorSpec("streams", (SIZE,), torch.float32),))
    channels = make_channels([boundary], schedule.stage_to_rank, slots)
    transport = open_transport("local", channels, 0, device=device, timeout_seconds=20)
    stages = {s: SleepyStage(s, cycles) for s in range(2)}
    lanes = open_lanes((0, 1), device, overlap=True)
    assert isinstance(lanes, StreamLanes)
    pairs = [step for step in schedule.orders[0] if isinstance(step, Pair)]
    executor = Executor(
        order, 0, stages, channels, transport, clock=CudaClock(), lanes=lanes, pairs=pairs
    )
    for _ in range(num_steps):
        executor.run([None] * num_micro_batches)
    times = {parse_op(t.op): t for t in executor.op_times()}
    transport.close()
    num_wrong = sum(int(stage.num_wrong) for stage in stages.values())
    return {op: t for op, t in times.items() if op.kind in COMPUTE}, pairs, num_wrong


def overlap_ns(one, other):
    """Time in which both ops compute."""
    return max(0, min(one.end, other.end) - max(one.ready, other.ready))


@on_one_gpu
def test_the_halves_of_every_pair_run_at_once_and_nothing_else_does():
    times, pairs, num_wrong = run_steps(lambda: CYCLES)
    assert num_wrong == 0
    assert len(pairs) > 8
    for pair in pairs:
        forward, backward = times[pair.forward], times[pair.backward]
        taken = min(t.end - t.ready for t in (forward, backward))
        assert taken > 0.4e6
        assert overlap_ns(forward, backward) > 0.5 * taken
        wall = max(forward.end, backward.end) - min(forward.ready, backward.ready)
        assert wall < 0.8 * sum(t.end - t.ready for t in (forward, backward))
    beside = {op: pair for pair in pairs for op in (pair.forward, pair.backward)}
    for one in times:
        for other in times:
            if one != other and (one not in beside or beside[one] != beside.get(other)):
                # Time stamps are floats of milliseconds.
                assert overlap_ns(times[one], times[other]) < 5_000, (one, other)


@on_one_gpu
def test_no_lane_reads_what_another_has_overwritten_however_late_it_is():
    rng = random.Random(5)
    _, _, num_wrong = run_steps(
        lambda: rng.choice((0, 0, CYCLES, 4 * CYCLES)), num_micro_batches=20, num_steps=6
    )
    assert num_wrong == 0


ORDER = ("pp.schedule=dualpipe_v", "train.num_micro_batches=6", "train.steps=2")
DETERMINISTIC = (
    "model.num_heads=16",
    "kernels.attention=triton",
    "kernels.attention_deterministic=true",
    "kernels.engram=triton",  # whose rows' gradients are summed in order, unlike index_add_
)
EXPERTS = ("model.expert_width=128", "moe.compute.backend=triton")
OVERLAP = "pp.overlap_pairs=true"
SHARES = "pp.pair_gemm_sms=[88, 44]"
EVEN = "pp.pair_gemm_sms=[64, 64]"
"""Of any GPU that the fused layer runs on."""
ALONE = {
    "bf16": (),
    "FP8 experts": EXPERTS,
    "recomputed": ("ac.mode=full_moe",),
    "offload": ("pp.activation_offload=true",),
    "masters": ("pp.offload_masters=true",),
    "rows ahead": ("engram.lookups_ahead=1",),
    "updates in the backward": (
        "optim.type=sign_sgd",
        "optim.clip_norm=default",
        "optim.apply_in_backward=true",
    ),
}


@pytest.fixture
def told(tmp_path):
    """`told(num_ranks, *overrides)` -> losses and gradient norms of a small run, bit for bit, and a
    digest of all that its checkpoint holds."""

    def run(num_ranks, *overrides):
        run_dir = tmp_path / f"{len([*tmp_path.iterdir()])}"
        run_dir.mkdir()
        steps = steps_on_gpus(num_ranks, run_dir, (*ORDER, *DETERMINISTIC, *overrides))
        return [(step.loss, step.grad_norm) for step in steps], checkpoint_digest(run_dir)

    return run


def assert_overlap_changes_no_bit(told, num_ranks, *overrides, shares=()):
    in_turn = told(num_ranks, *overrides)
    at_once = told(num_ranks, *overrides, OVERLAP, *shares)
    if at_once != in_turn:
        assert told(num_ranks, *overrides) == in_turn, "the run does not repeat itself"
    assert at_once == in_turn


@on_one_gpu
@pytest.mark.parametrize("pairs", [(), (OVERLAP,)], ids=["in turn", "at once"])
def test_backwards_from_the_ranks_own_thread_keep_every_bit(pairs, told):
    usual = told(1, "pp.size=1", *pairs)
    assert told(1, "pp.size=1", *pairs, "run.backward_thread=rank") == usual


@on_one_gpu
@pytest.mark.parametrize("case", ALONE)
def test_one_rank_whose_pairs_overlap_keeps_every_bit(case, told):
    shares = (SHARES,) if case == "FP8 experts" else ()
    assert_overlap_changes_no_bit(told, 1, "pp.size=1", *ALONE[case], shares=shares)


@on_two_gpus
@pytest.mark.parametrize("transport", ["copy_engine", "nccl"])
def test_a_pipeline_over_two_gpus_whose_pairs_overlap_keeps_every_bit(transport, told):
    own = ("pp.size=2", f"pp.transport={transport}")
    assert_overlap_changes_no_bit(told, 2, *own, *EXPERTS, shares=(SHARES,))


WAYS = {
    "torch": (),
    "torch, rows sent again": ("ac.mode=full_moe",),
    "deep_ep": ("moe.dispatch.type=deep_ep",),
    "mega_moe": ("moe.dispatch.type=mega_moe",),
    "mega_moe, rows pulled again": ("moe.dispatch.type=mega_moe", "ac.mode=full_moe"),
}


@on_two_gpus
@pytest.mark.parametrize("way", WAYS)
def test_experts_over_two_gpus_whose_pairs_overlap_keep_every_bit(way, told):
    if way == "deep_ep" and find_spec("deep_ep") is None:
        pytest.skip("needs the package deep_ep")
    shares = (EVEN,) if way.startswith("mega_moe") else ()
    spread = ("pp.size=1", "parallel.ep=2", *EXPERTS, *WAYS[way])
    assert_overlap_changes_no_bit(told, 2, *spread, shares=shares)
