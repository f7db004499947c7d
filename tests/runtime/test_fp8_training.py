"""FP8 experts inside runs: a pipeline's kernels against the recipe, and what is refused."""

from __future__ import annotations

import pytest
from fp8_cases import ON_GPU  # has kernels interpreted where there is no GPU, here and in ranks
from small_runs import checkpoint_digest, train

from ppruntime.compare import compare_metrics
from ppruntime.config import ConfigError, load
from ppruntime.experts.options import ExpertChoice, choose_experts, moe_options
from ppruntime.metrics import read_metrics
from ppruntime.models.kernels import expert_backends
from ppruntime.models.kernels.expert_backends import ExpertBackend

ONE_LAYER = (
    "model.name=tiny-v4",
    "model.num_layers=1",
    "model.compress_ratios=[0]",
    "model.num_hash_layers=0",
    "model.hidden_size=128",
    "model.expert_width=128",
    "model.num_experts=2",
    "model.experts_per_token=1",
    "train.seq_len=8",
    "train.num_micro_batches=2",
    "train.steps=2",
    "moe.compute.backend=triton",
)
PIPELINE = (
    "pp.size=2",
    "pp.layers_per_stage=[0.5, 0.5]",
    "pp.schedule=1f1b_w",
    "moe.compute.fused_wgrad_micro_batches=2",
)


def train_fp8(rank: int, run_dir: str, overrides: tuple[str, ...], *, by_recipe: bool) -> int:
    """Trains with the kernels, interpreted, or with the recipe in torch; how often expert weights
    were quantised."""
    from ppruntime import build
    from ppruntime.models.fp8_experts import Fp8Experts

    quantize, made = Fp8Experts._quantize, []

    def counted(self):
        made.append(1)
        return quantize(self)

    Fp8Experts._quantize = counted
    if by_recipe:
        build.choose_experts = lambda config: ExpertChoice(ExpertBackend.REFERENCE)
    code, _, errors = train(rank, run_dir, (*ONE_LAYER, *overrides))
    assert code == 0, errors
    return len(made)


def train_by_recipe(rank: int, run_dir: str, overrides: tuple[str, ...]) -> int:
    return train_fp8(rank, run_dir, overrides, by_recipe=True)


def train_with_kernels(rank: int, run_dir: str, overrides: tuple[str, ...]) -> int:
    return train_fp8(rank, run_dir, overrides, by_recipe=False)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="two ranks, and this may be one GPU")
def test_a_pipeline_with_put_off_and_fused_weight_gradients_follows_the_recipe(tmp_path, run_ranks):
    alone, cut, kernels = (tmp_path / name for name in ("alone", "cut", "kernels"))
    counts = run_ranks(1, train_by_recipe, str(alone), ("pp.size=1",))
    counts += run_ranks(2, train_by_recipe, str(cut), PIPELINE)
    counts += run_ranks(2, train_with_kernels, str(kernels), PIPELINE)
    # The second stage has the experts: once at the start, once after the first update.
    assert counts == [2, 0, 2, 0, 2]
    assert compare_metrics(cut / "metrics.jsonl", alone / "metrics.jsonl").equal
    steps, expected = (read_metrics(d / "metrics.jsonl") for d in (kernels, alone))
    for step, other in zip(steps, expected, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=1e-4)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="two ranks, and this may be one GPU")
def test_weight_gradients_put_off_or_added_two_at_once_change_no_bit_of_a_pipelines_run(
    tmp_path, run_ranks
):
    """Three micro-batches: one is left over where two are added at once."""
    told = {}
    for schedule in ("1f1b", "1f1b_w"):
        for num in (1, 2):
            how = (f"pp.schedule={schedule}", f"moe.compute.fused_wgrad_micro_batches={num}")
            run_dir = tmp_path / f"{schedule}-{num}"
            run_ranks(
                2, train_by_recipe, str(run_dir), (*PIPELINE, "train.num_micro_batches=3", *how)
            )
            told[schedule, num] = run_dir
    plain = told["1f1b", 1]
    for how, run_dir in told.items():
        assert compare_metrics(run_dir / "metrics.jsonl", plain / "metrics.jsonl").equal, how
        assert checkpoint_digest(run_dir) == checkpoint_digest(plain), how


def train_kept_and_freed(rank: int, folder: str) -> list[int]:
    """Two runs in bf16, one whose stages free gathered expert weights; how often each found them
    freed when a weight gradient was added."""
    from ppruntime.models.fp8_experts import Fp8Experts

    add, freed = Fp8Experts._add_weight_grads, [0, 0]

    def watched(self, micro_batch):
        freed[run] += not any(w.untyped_storage().size() for w in self.parameters())
        add(self, micro_batch)

    Fp8Experts._add_weight_grads = watched
    more = ("pp.size=1", "train.precision=bf16", "train.eval_interval=1", "data.type=stdlib")
    for run, keys in enumerate(((), ("moe.compute.free_bf16_expert_weights=[0]",))):
        train_by_recipe(rank, f"{folder}/{run}", (*more, *keys))
    return freed


@pytest.mark.long
@pytest.mark.slow
def test_freed_expert_weights_come_back_for_every_step_with_the_same_bits(tmp_path, run_ranks):
    """Evaluations between steps gather and free them too."""
    assert run_ranks(1, train_kept_and_freed, str(tmp_path)) == [[0, 4]]
    kept, freed = (tmp_path / name / "metrics.jsonl" for name in "01")
    assert compare_metrics(kept, freed).equal
    assert len(read_metrics(freed)) == 2


def config_with(backend: str, *overrides: str):
    return load(
        [], [*ONE_LAYER, "data.type=counting", f"moe.compute.backend={backend}", *overrides]
    )


def test_the_stages_that_a_list_names_turn_and_free_their_weights():
    config = config_with(
        "triton",
        *("pp.size=2", "pp.layers_per_stage=[0.5, 0.5]", "train.precision=bf16"),
        "moe.compute.fp8_transposed_on_demand=[1]",
        "moe.compute.free_bf16_expert_weights=true",
    )
    found = [moe_options(config, s, ExpertChoice(ExpertBackend.REFERENCE), None) for s in (0, 1)]
    assert [options.fp8.fp8_transposed_on_demand for options in found] == [False, True]
    assert [options.fp8.free_weights for options in found] == [True, True]


def test_a_backend_that_is_missing_is_refused_with_its_reason_and_what_works(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'there is no CUDA device.*use "torch"') as caught:
        choose_experts(config_with("triton"))
    assert str(caught.value).startswith('moe.compute.backend = "triton": ')
    with pytest.raises(ConfigError) as caught:
        choose_experts(config_with("deep_gemm"))
    # Neither the interpreter nor "triton" would help.
    assert str(caught.value) == (
        'moe.compute.backend = "deep_gemm" needs a Hopper GPU (sm_90); use "torch", which runs'
        " everywhere"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match=r'needs a Hopper GPU .*backend = "triton" to run'):
        choose_experts(config_with("deep_gemm"))


def test_auto_takes_the_fastest_that_works_and_says_why(monkeypatch):
    works: set[ExpertBackend] = set()
    for module in ("ppruntime.experts.options", expert_backends.__name__):
        monkeypatch.setattr(
            f"{module}.unavailable_reason",
            lambda backend: None if backend in works else f"no {backend.value} here",
        )
    choice = choose_experts(config_with("auto"))
    assert choice.backend is None
    assert choice.note == (
        'moe.compute.backend = "auto" takes torch: experts in the compute dtype (no deep_gemm here;'
        " no triton here)"
    )
    works.add(ExpertBackend.TRITON)
    choice = choose_experts(config_with("auto"))
    assert choice.backend is ExpertBackend.TRITON
    assert choice.note == (
        'moe.compute.backend = "auto" takes triton: FP8 experts (no deep_gemm here)'
    )
    works.add(ExpertBackend.DEEP_GEMM)
    choice = choose_experts(config_with("auto"))
    assert (choice.backend, choice.note) == (
        ExpertBackend.DEEP_GEMM,
        'moe.compute.backend = "auto" takes deep_gemm: FP8 experts',
    )
