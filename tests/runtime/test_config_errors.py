"""Each kind of mistake in a config, with the exact words that its author reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppruntime.config import ConfigError, load

# Lines 1 to 21; the tests below name them.
RUN = """\
[model]
name = "tiny"

[pp]
size = 4
schedule = "1f1b"

[train]
num_micro_batches = 8
steps = 30

[data]
type = "stdlib"

[optim]
lr = 1e-3
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(text, *overrides)` -> the lines of the error that the config gives."""
    monkeypatch.chdir(tmp_path)

    def lines(text, *overrides):
        Path("run.toml").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load(["run.toml"], overrides)
        return str(caught.value).splitlines()

    return lines


def replaced(old, new):
    assert old in RUN
    return RUN.replace(old, new)


VALUES = [
    ("size = 4", "size = 0", 5, "pp.size = 0 is not allowed; expected an integer from 1 to 1024"),
    (
        "size = 4",
        'size = "4"',
        5,
        'pp.size = "4" is not allowed; expected an integer from 1 to 1024',
    ),
    (
        "size = 4",
        "size = 2.5",
        5,
        "pp.size = 2.5 is not allowed; expected an integer from 1 to 1024",
    ),
    (
        "size = 4",
        "size = true",
        5,
        "pp.size = true is not allowed; expected an integer from 1 to 1024",
    ),
    (
        "lr = 1e-3",
        "lr = nan",
        16,
        "optim.lr = nan is not allowed; expected a finite number above 0",
    ),
    (
        "lr = 1e-3",
        "lr = inf",
        16,
        "optim.lr = inf is not allowed; expected a finite number above 0",
    ),
    (
        "lr = 1e-3",
        "betas = [0.9, 1.0]",
        16,
        "optim.betas = [0.9, 1.0] is not allowed; expected a list of 2, each entry a finite number "
        "at least 0 and below 1",
    ),
    (
        "lr = 1e-3",
        "betas = [0.9]",
        16,
        "optim.betas = [0.9] is not allowed; expected a list of 2, each entry a finite number "
        "at least 0 and below 1",
    ),
    (
        "size = 4",
        "layers_per_stage = [2, nan]",
        5,
        "pp.layers_per_stage = [2, nan] is not allowed; expected a list, each entry a finite "
        "number from 0 to 4096",
    ),
    (
        "size = 4",
        "warmup_step = -1",
        5,
        "pp.warmup_step = -1 is not allowed; expected an integer from 0 to 1024 or a list, each "
        "entry an integer at least 0",
    ),
    (
        "size = 4",
        'transport = "ncl"',
        5,
        'pp.transport = "ncl" is not allowed; expected one of "auto", "copy_engine", "gloo", '
        '"local", "nccl", "put", "shared_memory" or a list, each entry one of "auto", '
        '"copy_engine", '
        '"gloo", "local", "nccl", "put", "shared_memory"; did you mean "nccl"?',
    ),
    (
        'type = "stdlib"',
        'type = "stdlib"\nreset_positions = 1',
        14,
        "data.reset_positions = 1 is not allowed; expected true or false",
    ),
    (
        'type = "stdlib"',
        'type = "stdlib"\npath = 1979-05-27',
        14,
        'data.path = "1979-05-27" is not allowed; expected a text in quotes',
    ),
    ("steps = 30", "steps = 30\nseed = 9999999999999999999999", 11, None),
]


@pytest.mark.parametrize(("old", "new", "line", "text"), VALUES)
def test_a_value_that_its_key_does_not_take(old, new, line, text, run):
    found = run(replaced(old, new))
    if text is None:
        text = (
            "train.seed = 9999999999999999999999 is not allowed; expected an integer from 0 to "
            "9223372036854775807"
        )
    assert found == [f"run.toml:{line}: {text}"]


NAMES = [
    ("size = 4", "siez = 4", 5, 'pp.siez is not a key; did you mean "size"?'),
    (
        "[optim]",
        "[optimizer]",
        15,
        "optimizer is not a section; expected one of model, pp, parallel, train, data, optim, "
        'checkpoint, run, ac, engram, moe, kernels, fault; did you mean "optim"?',
    ),
    (
        "[optim]\nlr = 1e-3",
        "[parallel]\ntensor = 2",
        16,
        "parallel.tensor is not a key; [parallel] has dp, ep",
    ),
    (
        'name = "tiny"',
        'name = "tiny"\nnum_layer = 8',
        3,
        'model.num_layer is not a key; did you mean "num_layers"?',
    ),
    (
        'name = "tiny"',
        'name = "tiny"\nforce_balanced_routing = true',
        3,
        "model.force_balanced_routing is not a key; write train.force_balanced_routing",
    ),
    (
        "[model]",
        "size = 2\n[model]",
        1,
        "size is not a section, it is a key of [pp]; write pp.size",
    ),
    (
        'name = "tiny"',
        'name = "tinny"',
        2,
        'model.name = "tinny" is not a model; expected one of "tiny", "tiny-v4", "v41-proxy-8", '
        '"v4-proxy-8", "v41-flash", "v4-flash"; did you mean "tiny"?',
    ),
    (
        'name = "tiny"',
        "",
        1,
        'model.name is missing; write one of "tiny", "tiny-v4", "v41-proxy-8", "v4-proxy-8", '
        '"v41-flash", "v4-flash"',
    ),
    (
        "[optim]\nlr = 1e-3",
        "[moe]\ndispatch = 3",
        16,
        "moe.dispatch = 3 is not allowed; moe.dispatch is a section of keys",
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "text"), NAMES)
def test_a_name_that_is_none(old, new, line, text, run):
    assert run(replaced(old, new)) == [f"run.toml:{line}: {text}"]


RULES = [
    (
        "pp.layers_per_stage=[2, 2, 4]",
        "pp.layers_per_stage has 3 entries, pp.size 4 x 1 stages per rank needs 4; leave it out "
        "for "
        "a balanced cut",
    ),
    (
        "pp.layers_per_stage=[2, 2, 1.25, 2.75]",
        "pp.layers_per_stage gives stage 2 1.25 layers; a stage has a multiple of 0.5, such as 1",
    ),
    (
        "pp.layers_per_stage=[2, 2, 1.5, 1]",
        "pp.layers_per_stage sums to 6.5, the model has 8 layers; the last entry could be 2.5",
    ),
    (
        "pp.layers_per_stage=[5, 5, 0, 1]",
        "pp.layers_per_stage sums to 11, the model has 8 layers; the entries before the last are "
        "already 2 too many",
    ),
    (
        "pp.stages_per_rank=2",
        'pp.stages_per_rank = 2 does not fit pp.schedule = "1f1b", which has one stage per rank; '
        'use 1, or "interleaved_1f1b" or "interleaved_zb1p"',
    ),
    (
        "pp.schedule=zb_v pp.stages_per_rank=3",
        'pp.stages_per_rank = 3 does not fit pp.schedule = "zb_v", whose stages form a V; leave it '
        "out or use 2",
    ),
    (
        "pp.warmup_step=2",
        'pp.warmup_step = 2 has no effect on pp.schedule = "1f1b"; leave it out, or use "1f1b_w" '
        "or "
        '"async_1f1b"',
    ),
    (
        "pp.schedule=async_1f1b pp.warmup_step=[2,1]",
        "pp.warmup_step has 2 entries, pp.size = 4 needs 4, one a rank",
    ),
    (
        "pp.schedule=async_1f1b pp.warmup_step=[2,1,3,0]",
        "pp.warmup_step = [2, 1, 3, 0] rises from one rank to the next, which deadlocks; "
        "[3, 2, 1, 0] would work",
    ),
    (
        "pp.schedule=zb_h1 pp.defer_weight_grads=true",
        'pp.defer_weight_grads = true has no effect on pp.schedule = "zb_h1", which splits its '
        'backwards itself; leave it out, or use "1f1b" or "async_1f1b" or "gpipe" or '
        '"interleaved_1f1b"',
    ),
    (
        "pp.offload_every=2",
        "pp.offload_every = 2 has no effect without pp.activation_offload = true; set both or "
        "neither",
    ),
    (
        "pp.activation_offload=true pp.offload_target=fp8 pp.offload_paced=true",
        'pp.offload_paced = true has no effect on pp.offload_target = "fp8", which copies nothing '
        'off the device; leave it out, or use "host"',
    ),
    (
        "pp.activation_offload=true pp.offload_every=9",
        "pp.offload_every = 9 is more than train.num_micro_batches = 8: only the first would move; "
        "use a smaller one",
    ),
    (
        "optim.apply_in_backward=true",
        'optim.apply_in_backward = true does not work with optim.type = "adamw", only with '
        '"sign_sgd", whose updates need no other gradient; leave it out',
    ),
    (
        "optim.type=sign_sgd optim.clip_norm=default optim.betas=[0.9,0.9]",
        'optim.betas = [0.9, 0.9] has no effect on optim.type = "sign_sgd", which reads nothing '
        "but signs; leave it out",
    ),
    (
        "optim.type=muon optim.apply_in_backward=true",
        'optim.apply_in_backward = true does not work with optim.type = "muon", only with '
        '"sign_sgd", whose updates need no other gradient; leave it out',
    ),
    (
        "optim.momentum=0.9",
        'optim.momentum = 0.9 has no effect on optim.type = "adamw"; leave it out, or use "muon"',
    ),
    (
        "optim.type=sign_sgd optim.clip_norm=1.5",
        'optim.clip_norm = 1.5 has no effect on optim.type = "sign_sgd", which reads nothing but '
        "signs; leave it out",
    ),
    (
        "optim.type=sign_sgd optim.apply_in_backward=true optim.clip_norm=1.5",
        "optim.clip_norm = 1.5 needs all gradients before the first update, and "
        "optim.apply_in_backward = true frees them one by one; leave one of them out",
    ),
    (
        "pp.offload_masters=true train.precision=fp32",
        'pp.offload_masters = true has no effect with train.precision = "fp32" on one data rank, '
        'where the weights are their own masters; leave it out, or use "bf16"',
    ),
    (
        "pp.offload_masters=true train.precision=bf16 train.num_micro_batches=1",
        "pp.offload_masters = true has no effect with train.num_micro_batches = 1: first and last "
        "forward are one; leave it out",
    ),
    (
        "parallel.ep=3",
        "parallel.ep = 3 does not divide the model's 8 experts; use a divisor of 8",
    ),
    (
        "moe.compute.backend=triton",
        'moe.compute.backend = "triton" needs widths that are multiples of 128; model.hidden_size '
        'is 64, model.expert_width 48; use "torch"',
    ),
    (
        "kernels.linear_wgrad_tile_scales=true",
        'kernels.linear_wgrad_tile_scales = true has no effect on kernels.linear = "reference", '
        'which has no FP8; set kernels.linear = "auto", or leave it out',
    ),
    (
        "moe.compute.wgrad_tile_scales=true",
        'moe.compute.wgrad_tile_scales = true has no effect on moe.compute.backend = "torch"; '
        'leave it out or use "triton"',
    ),
    (
        "model.hidden_size=128 model.expert_width=128 moe.compute.backend=triton "
        "moe.compute.fused_wgrad_micro_batches=[1,2]",
        "moe.compute.fused_wgrad_micro_batches has 2 entries for 4 stages; give one a stage, or one"
        " number for all",
    ),
    (
        "model.hidden_size=128 model.expert_width=128 moe.compute.backend=auto "
        "moe.compute.fp8_transposed_on_demand=[0,4]",
        "moe.compute.fp8_transposed_on_demand names stage 4; stages are numbered 0 to 3",
    ),
    (
        "model.hidden_size=128 model.expert_width=128 moe.compute.backend=auto "
        "moe.compute.free_bf16_expert_weights=[5]",
        "moe.compute.free_bf16_expert_weights names stage 5; stages are numbered 0 to 3",
    ),
    (
        "model.hidden_size=128 model.expert_width=128 moe.compute.backend=triton "
        "train.precision=fp32 moe.compute.free_bf16_expert_weights=true",
        'moe.compute.free_bf16_expert_weights = true has no effect on train.precision = "fp32", '
        'which has no weights in bf16; leave it out or use "bf16"',
    ),
    (
        "moe.compute.free_bf16_expert_weights=true",
        "moe.compute.free_bf16_expert_weights = true has no effect on moe.compute.backend = "
        '"torch"; leave it out or use "triton"',
    ),
    (
        "data.type=tokens",
        'data.path is missing, data.type = "tokens" needs the prefix of a token file; make one '
        'with "ppruntime data build --out PREFIX FILES", or use data.type = "stdlib"',
    ),
    (
        "data.type=random data.validation_share=0.1",
        'data.validation_share has no effect on data.type = "random", which makes its tokens up; '
        "leave it out",
    ),
    (
        "train.eval_steps=2",
        "train.eval_steps = 2 has no effect without train.eval_interval; set both or neither",
    ),
    (
        "train.eval_interval=5 data.validation_share=0",
        "train.eval_interval = 5 needs documents to evaluate on, and data.validation_share is 0; "
        "set it to a share such as 0.01",
    ),
    (
        "optim.min_lr=0.1",
        "optim.min_lr = 0.1 is above optim.lr = 0.001; it is where the learning rate ends, at most "
        "optim.lr",
    ),
    (
        "optim.warmup_steps=31",
        "optim.warmup_steps = 31 is more than train.steps = 30; the learning rate would never "
        "reach optim.lr",
    ),
    (
        "train.force_balanced_routing=true train.routing_bias_rate=0.001",
        "train.routing_bias_rate = 0.001 has no effect with train.force_balanced_routing = true; "
        "leave one of them out",
    ),
    (
        "kernels.head=triton train.precision=fp32",
        'kernels.head = "triton" does not run with train.precision = "fp32"; use "chunked"',
    ),
    (
        "kernels.mhc=triton train.precision=fp32",
        'kernels.mhc = "triton" does not run with train.precision = "fp32"; use "reference"',
    ),
    (
        "train.indexer_loss_weight=0.1 model.name=tiny-v4 "
        "model.compress_ratios=[0,0,16,16,16,16,0,0]",
        "train.indexer_loss_weight = 0.1 has no effect: no layer has an indexer; leave it out",
    ),
    (
        "model.residual_type=gated model.num_streams=4",
        "model: num_streams is 4; residual_type gated has 1",
    ),
    (
        "kernels.mhc=auto model.num_streams=3",
        'kernels.mhc = "auto" takes 2, 4 or 8 streams, model.num_streams is 3; use "reference"',
    ),
    (
        "kernels.head=triton run.device=cpu",
        'kernels.head = "triton" does not run with run.device = "cpu"; use "chunked"',
    ),
    (
        "kernels.linear=scaled_mm",
        'kernels.linear = "scaled_mm" does not take this model: widths have to be multiples of '
        '128, hidden_size is 64; use "reference"',
    ),
    (
        "run.timeline_step=30",
        "run.timeline_step = 30 is never reached, steps are numbered 0 to 29; leave it out for the "
        "last one",
    ),
    (
        "fault.nonfinite_max=5",
        'fault.nonfinite_max = 5 has no effect on fault.nonfinite = "stop"; leave it out, or use '
        '"skip"',
    ),
    (
        "moe.dispatch.fp8=true",
        "moe.dispatch.fp8 = true has no effect on parallel.ep = 1, all experts are where their "
        "tokens are; leave it out",
    ),
    (
        "moe.dispatch.type=deep_ep",
        'moe.dispatch.type = "deep_ep" has no effect on parallel.ep = 1, all experts are where '
        "their tokens are; leave it out",
    ),
    (
        "parallel.ep=2 moe.dispatch.fp8_grad=true model.hidden_size=64",
        "moe.dispatch.fp8_grad = true needs rows of a multiple of 128 values; model.hidden_size is "
        "64; leave it out",
    ),
    (
        "parallel.ep=2 moe.dispatch.token_chunks=2",
        'moe.dispatch.token_chunks = 2 has no effect on moe.dispatch.type = "torch"; leave it out '
        'or use "deep_ep"',
    ),
    (
        "parallel.ep=16 model.num_experts=16 moe.dispatch.type=deep_ep",
        'moe.dispatch.type = "deep_ep" moves tokens inside a host of 2, 4 or 8 ranks; parallel.ep '
        'is 16; use "torch"',
    ),
    (
        "parallel.ep=2 train.precision=fp32 moe.dispatch.type=deep_ep",
        'moe.dispatch.type = "deep_ep" moves rows in bf16 or FP8; train.precision is "fp32"; use '
        '"torch"',
    ),
    (
        "parallel.ep=2 moe.dispatch.type=deep_ep run.device=cpu",
        'moe.dispatch.type = "deep_ep" needs GPUs; run.device is "cpu"; use "torch"',
    ),
    (
        "parallel.ep=2 moe.dispatch.type=deep_ep moe.dispatch.transfer_sms=21",
        "moe.dispatch.transfer_sms = 21 is odd, half of them send and half receive; use 20",
    ),
    (
        "model.hidden_size=128 model.expert_width=128 moe.dispatch.type=mega_moe run.device=cpu",
        'moe.dispatch.type = "mega_moe" does not run with run.device = "cpu"; use "torch", which '
        "runs everywhere",
    ),
    (
        "moe.dispatch.type=mega_moe train.precision=fp32 model.hidden_size=128 "
        "model.expert_width=128",
        'moe.dispatch.type = "mega_moe" does not run with train.precision = "fp32"; use "torch", '
        "which runs everywhere",
    ),
    (
        "moe.dispatch.type=mega_moe model.hidden_size=64",
        'moe.dispatch.type = "mega_moe" needs widths that are multiples of 128; model.hidden_size '
        'is 64, model.expert_width 48; use "torch"',
    ),
    (
        "moe.dispatch.type=mega_moe moe.compute.backend=deep_gemm model.hidden_size=128 "
        "model.expert_width=128",
        'moe.compute.backend = "deep_gemm" cannot wait for rows that moe.dispatch.type = '
        '"mega_moe" brings while it multiplies; use "triton", or "torch" for bf16',
    ),
    (
        "moe.dispatch.type=mega_moe moe.dispatch.fp8_grad=true model.hidden_size=128 "
        "model.expert_width=128",
        'moe.dispatch.fp8_grad = true: moe.dispatch.type = "mega_moe" sends what its experts '
        'multiply, and moe.compute.backend = "torch" is bf16; leave it out or use "triton"',
    ),
    (
        "moe.dispatch.type=mega_moe moe.dispatch.token_chunks=2 model.hidden_size=128 "
        "model.expert_width=128",
        'moe.dispatch.token_chunks = 2 has no effect on moe.dispatch.type = "mega_moe", which '
        "multiplies rows block by block as they come; leave it out",
    ),
    (
        "moe.dispatch.type=mega_moe moe.dispatch.transfer_sms=24 pp.gemm_sms=20 "
        "model.hidden_size=128 model.expert_width=128",
        "moe.dispatch.transfer_sms = 24 leaves none of pp.gemm_sms = 20 for the products that run "
        "beside it; use fewer",
    ),
    (
        "pp.overlap_pairs=true",
        'pp.overlap_pairs = true has no effect on pp.schedule = "1f1b", which has no pairs; leave '
        'it out, or use "dualpipe_v"',
    ),
    (
        "pp.pair_gemm_sms=[66,66]",
        "pp.pair_gemm_sms = [66, 66] has no effect without pp.overlap_pairs = true; set both or "
        "neither",
    ),
    (
        "pp.schedule=dualpipe_v pp.overlap_pairs=true pp.pair_gemm_sms=[66,66] run.device=cpu",
        'pp.pair_gemm_sms = [66, 66] has no effect on run.device = "cpu"; leave it out',
    ),
    (
        "pp.schedule=dualpipe_v pp.overlap_pairs=true moe.dispatch.type=mega_moe "
        "model.hidden_size=128 model.expert_width=128",
        'pp.overlap_pairs = true with moe.dispatch.type = "mega_moe", whose products wait for rows '
        "on the multiprocessors that they occupy, needs pp.pair_gemm_sms, so that both halves find "
        "room; set it, such as [66, 66] on 132",
    ),
    (
        "pp.schedule=dualpipe_v pp.overlap_pairs=true pp.pair_gemm_sms=[112,20] "
        "moe.dispatch.type=mega_moe model.hidden_size=128 model.expert_width=128",
        "moe.dispatch.transfer_sms = 24 leaves none of pp.pair_gemm_sms = 20 for the products that "
        "run beside it; use fewer",
    ),
    (
        "parallel.ep=2 moe.dispatch.capacity_factor=1.25",
        'moe.dispatch.capacity_factor = 1.25 has no effect on moe.dispatch.type = "torch"; leave '
        'it out or use "mega_moe"',
    ),
    ('run.dir=""', 'run.dir = "" is not a path; it is empty or has unprintable characters'),
    ("model.num_heads=3", "model: o_groups 2 does not divide num_heads 3"),
    (
        "model.num_layers=5000",
        "model: num_layers is 5000; it has to be at most 4096",
    ),
]


@pytest.mark.parametrize(("overrides", "text"), RULES)
def test_keys_that_do_not_go_together(overrides, text, run):
    (line,) = run(RUN, *_split(overrides))
    place, _, rest = line.partition(": ")
    assert rest == text
    assert place in ("command line", "run.toml:12")


def _split(overrides):
    """Splits at blanks that are followed by a key."""
    parts = []
    for word in overrides.split(" "):
        if "=" in word:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts


def test_all_mistakes_come_in_one_go_in_the_order_of_the_file(run):
    text = RUN.replace("size = 4", "siez = 4").replace("steps = 30", "steps = 0")
    text = text.replace("lr = 1e-3", "lr = 1e-3\nmin_lr = 1\neps = nan")
    assert [line.split(" ", 2)[:2] for line in run(text, "parallel.ep=5", "oops")] == [
        ["command", "line:"],
        ["command", "line:"],
        ["run.toml:5:", "pp.siez"],
        ["run.toml:10:", "train.steps"],
        ["run.toml:17:", "optim.min_lr"],
        ["run.toml:18:", "optim.eps"],
    ]


def test_a_rule_is_silent_about_keys_whose_value_was_refused(run):
    """pp.size is in doubt, so nothing can be said about a cut into pp.size stages."""
    assert len(run(RUN, "pp.size=0", "pp.layers_per_stage=[8]")) == 1


def test_the_place_is_the_file_that_set_the_value(run):
    Path("overlay.toml").write_text("# an overlay\n[pp]\nlayers_per_stage = [4, 4]\n")
    Path("run.toml").write_text(RUN)
    with pytest.raises(ConfigError) as caught:
        load(["run.toml", "overlay.toml"])
    assert str(caught.value).startswith("overlay.toml:3: pp.layers_per_stage has 2 entries")
    with pytest.raises(ConfigError) as caught:
        load(["run.toml", "overlay.toml"], ["pp.layers_per_stage=[1]"])
    assert str(caught.value).startswith("command line: pp.layers_per_stage has 1 entries")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[pp]\nsize = \n", "run.toml:2: not legal TOML: Invalid value (column 8)"),
        ("[pp]\n[pp]\n", 'run.toml:2: not legal TOML: Cannot declare ("pp",) twice (column 4)'),
        ("a = " + "[" * 3000, "run.toml:1: not legal TOML: nested too deeply"),
        ("#" + "x" * (1 << 20), "run.toml:1: not legal TOML: the file has more than 1048576 bytes"),
    ],
)
def test_a_text_that_is_no_toml(text, error, run):
    assert [line.replace("'", '"') for line in run(text)] == [error]


def test_a_file_that_is_not_there_and_the_one_that_was_meant(run):
    Path("other.toml").write_text(RUN)
    with pytest.raises(ConfigError) as caught:
        load(["othr.toml", "nothing-like-it"])
    assert str(caught.value).splitlines() == [
        "nothing-like-it: cannot be read: No such file or directory",
        "othr.toml: cannot be read: No such file or directory; did you mean other.toml?",
    ]


@pytest.mark.parametrize("text", ["pp.size", "size=2", ".size=2", "pp.=2", "=", "--steps"])
def test_a_text_that_is_no_override(text, run):
    assert run(RUN, text) == [
        f'command line: "{text}" is not an override; write section.key=value, such as pp.size=2'
    ]


@given(st.binary(max_size=200), st.text(max_size=40))
def test_any_bytes_give_a_config_or_a_config_error(tmp_path_factory, content, override):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    for paths, overrides in (([path], []), ([], [override]), ([], [f"model.name={override}"])):
        with pytest.raises(ConfigError):
            load(paths, overrides)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "pp.transport_ctas=4",
            'pp.transport_ctas = 4 has no effect on pp.transport = "auto"; '
            'leave it out or use "nccl"',
        ),
        (
            "pp.recv_lead=2",
            'pp.recv_lead = 2 has no effect on pp.transport = "auto"; leave it out or use "nccl"',
        ),
        (
            "pp.nccl_library=/lib/libnccl.so pp.transport=nccl",
            'pp.nccl_library = "/lib/libnccl.so" has no effect on pp.transport = "nccl"; '
            'leave it out or use "put"',
        ),
        (
            'pp.recv_lead=2 pp.transport=["put","auto"] pp.size=3',
            'pp.recv_lead = 2 has no effect on pp.transport = ["put", "auto"]; leave it out or use'
            ' "nccl"',
        ),
        (
            "pp.transport_ctas=65 pp.transport=nccl",
            "pp.transport_ctas = 65 is not allowed; expected an integer from 1 to 64",
        ),
        (
            'pp.transport=["put"] pp.size=3',
            'pp.transport = ["put"] has 1 entries, 3 stages have 2 hops from one to the next; give'
            " one for each hop, or one name for all",
        ),
        (
            "pp.transport=[] pp.size=2",
            "pp.transport = [] has 0 entries, 2 stages have 1 hops from one to the next; give one"
            " for each hop, or one name for all",
        ),
        (
            "pp.transport=local pp.size=2",
            'pp.transport = "local" does not leave a rank, and pp.size = 2; use "copy_engine" or'
            ' "nccl" or "put", or "auto"',
        ),
        (
            'pp.transport=["gloo","local"] pp.size=3 run.device=cpu',
            'pp.transport = ["gloo", "local"] does not leave a rank, and pp.size = 3; use "gloo" or'
            ' "shared_memory", or "auto"',
        ),
        (
            "pp.transport=put pp.size=2 run.device=cpu",
            'pp.transport = "put" does not move what lies where run.device = "cpu" has it; use'
            ' "gloo" or "shared_memory", or "auto"',
        ),
        (
            "pp.transport=gloo pp.size=2 run.device=cuda",
            'pp.transport = "gloo" does not move what lies where run.device = "cuda" has it; use'
            ' "copy_engine" or "nccl" or "put", or "auto"',
        ),
    ],
)
def test_an_option_of_another_transport_is_a_mistake(override, text):
    tiny = Path(__file__).resolve().parents[2] / "launch" / "configs" / "tiny.toml"
    with pytest.raises(ConfigError) as caught:
        load([tiny], override.split(" "))
    assert str(caught.value) == f"command line: {text}"


@pytest.mark.parametrize("value", ['"half"', '["full"]', '["full", "none", "full"]', "3"])
def test_a_wrong_value_within_a_table_is_answered_by_what_its_values_may_be(value, run):
    (text,) = run(RUN, f"ac.layer_modes={{0 = {value}}}")
    assert text.startswith("command line: ac.layer_modes = ")
    assert 'expected a table, each value one of "attention", "full"' in text
    assert "or a list of 2, each entry one of" in text
