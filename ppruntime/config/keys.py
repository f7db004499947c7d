"""Every key of a config file, as frozen structs: one struct a TOML section, one field a key.

Under each field: what it means, its unit, why the default is what it is, and its numeric class:

    bitwise           any value gives the same losses, bit for bit (fp32, CPU, one thread)
    summation order   the same sums in another order
    changes numerics  other losses
    no numerics       does not touch a tensor that is trained

Ranges and choices stand in the types; what concerns two keys at once is in `rules.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from ppruntime.models.dims import ModelDims

Count: TypeAlias = Annotated[int, Meta(ge=1, le=65536)]
Steps: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]

ScheduleName: TypeAlias = Literal[
    "gpipe",
    "1f1b",
    "async_1f1b",
    "1f1b_w",
    "interleaved_1f1b",
    "interleaved_zb1p",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
]
TransportName: TypeAlias = Literal[
    "auto", "local", "gloo", "shared_memory", "nccl", "copy_engine", "put"
]
TRAIN_KEYS_OF_DIMS = ("balance_loss_weight", "indexer_loss_weight", "force_balanced_routing")
"""Fields of `ModelDims` that are keys of [train], since they are no property of a checkpoint."""
V_SCHEDULES = frozenset({"zb_v", "v_half", "v_min", "dualpipe_v"})
"""Orders that place stages in a V: rank r holds stages r and 2 P - 1 - r."""
PAIR_SCHEDULES = frozenset({"dualpipe_v"})
"""Orders whose steady state is pairs, a forward of one chunk and a backward of the other."""
LOOP_SCHEDULES = frozenset({"interleaved_1f1b", "interleaved_zb1p"})
"""Orders with several stages per rank, stage s on rank s mod P."""
RecomputeMode: TypeAlias = Literal[
    "none", "full", "full_moe", "projections", "attention", "matmul", "selective"
]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all sections share: immutable, named arguments only, unknown keys refused."""


class Model(Section, frozen=True):
    """`[model]`: `name` picks a preset, every other key replaces that field of its dims."""

    name: str
    """Preset of `models/dims.py`: tiny, v41-flash, ... Changes numerics."""
    dims: ModelDims
    """The sizes, with the section's other keys and `TRAIN_KEYS_OF_DIMS` in them. Not a key
    itself."""


class Pipeline(Section, frozen=True):
    """`[pp]`: the pipeline, its order of work and its transport."""

    size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Pipeline ranks. Default: no pipeline. Bitwise."""
    schedule: ScheduleName = "1f1b"
    """Order of work. Default: least memory without split backwards. Bitwise."""
    stages_per_rank: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Stages on each rank. Default: 2 for interleaved and V orders, else 1. Bitwise."""
    layers_per_stage: tuple[Annotated[float, Meta(ge=0, le=4096)], ...] | None = None
    """Layers of each stage in stage order, in multiples of 0.5; the embedding comes on top of the
    first, final norm and head of the last. Default: the cut that balances FLOPs. Bitwise."""
    warmup_step: (
        Annotated[int, Meta(ge=0, le=1024)] | tuple[Annotated[int, Meta(ge=0)], ...] | None
    ) = None
    """Extra forwards in flight: s gives rank r s (size - 1 - r) forwards before its first backward,
    a list gives that number for each rank. Default: 2 for async_1f1b. Bitwise."""
    transport: TransportName | tuple[TransportName, ...] = "auto"
    """What moves boundaries between ranks, both ways; a list names one for each hop from a stage to
    the next. Default: the fastest one that works there. Bitwise at one gemm_sms, whose default is
    another one for nccl."""
    transport_ctas: Annotated[int, Meta(ge=1, le=64)] | None = None
    """Thread blocks that an nccl transfer may occupy. Default: 4, with transport = "auto"
    NCCL's. Bitwise."""
    gemm_sms: Count | None = None
    """Multiprocessors that GEMMs may occupy on a GPU, so that transfers find some free: our kernels
    and deep_gemm never take more, torch's FP8 products neither, its bf16 matmuls take it as a hint
    or not at all. Default: all, for transport = "nccl" all but three times transport_ctas.
    Summation order."""
    overlap_pairs: bool = False
    """On GPUs, run the forward and the backward of each of the order's pairs at once, on streams of
    their own, so that what one waits for is hidden behind the other's products; dispatcher buffers
    are there once for each stage of a rank. On a CPU they run one after the other. Bitwise."""
    pair_gemm_sms: tuple[Count, Count] | None = None
    """Multiprocessors that the GEMMs of a pair's forward, and those of its backward, may occupy
    while both run; as gemm_sms otherwise. Default: gemm_sms for either, so that they queue for the
    same ones. Summation order; bitwise where gemm_sms is."""
    nccl_library: str | None = None
    """Path of the libnccl that put loads. Default: the installed one. Bitwise."""
    activation_offload: bool = False
    """Keep in-flight micro-batches' saved activations elsewhere between forward and backward, see
    offload_target. Bitwise, with target fp8 changes numerics."""
    offload_every: Count = 1
    """Offload one micro-batch in this many; the others stay. Bitwise."""
    offload_paced: bool = False
    """Let forwards of the warm-up wait for the copies to the host, so that no more than one is on
    its way: the least memory. Default: never wait, until the first backward has run. Bitwise."""
    offload_target: Literal["host", "fp8"] = "host"
    """host: pinned host memory. fp8: on the device, in E4M3 with a power-of-two scale for each 128
    values; only tensors in the compute dtype. Default: exact. Changes numerics (fp8)."""
    offload_masters: bool = False
    """Keep sharded fp32 masters in host memory from a stage's first forward of a step until its
    last one is through. Bitwise."""
    defer_weight_grads: bool = False
    """Compute weight gradients after the input gradient is on its way. Bitwise."""
    recv_lead: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """Receives are posted at most this many ops ahead of their reader, and at most this many are
    pending. Default: as early as a slot is free. Bitwise."""
    timeout_seconds: Seconds = 300.0
    """Longest wait for one transfer; ranks that share experts wait half of it for each other.
    Default: above any healthy step. No numerics."""

    @property
    def num_chunks(self) -> int:
        """Stages per rank, the schedule's own number where the file gives none."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 2 if self.schedule in V_SCHEDULES | LOOP_SCHEDULES else 1

    @property
    def transport_names(self) -> tuple[str, ...]:
        """The list of `transport`, of one name if it is one for all hops."""
        return (self.transport,) if isinstance(self.transport, str) else self.transport

    @property
    def transport_of_all(self) -> str | None:
        """The name that is for all hops; None where they differ."""
        return self.transport_names[0] if len(set(self.transport_names)) == 1 else None

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.size * self.num_chunks


class Parallel(Section, frozen=True):
    """`[parallel]`: the other mesh axes. World size = pp.size x dp x ep."""

    dp: Annotated[int, Meta(ge=1, le=65536)] = 1
    """Data-parallel replicas of each expert shard. Summation order."""
    ep: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Expert-parallel ranks; each holds 1/ep of the experts and data of its own. Summation
    order."""

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different data: dp x ep."""
        return self.dp * self.ep


class Train(Section, frozen=True):
    """`[train]`: how much of what is trained."""

    num_micro_batches: Count = 8
    """Micro-batches of one data rank in one step. Summation order."""
    micro_batch_size: Count = 1
    """Sequences in a micro-batch. Summation order."""
    seq_len: Annotated[int, Meta(ge=2, le=1_048_576)] = 4096
    """Tokens in a sequence. Changes numerics."""
    steps: Steps = 100
    """Optimizer steps of the whole run. Changes numerics (the learning rate's end depends on
    it)."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """Seed of the weights and of the data order. Changes numerics."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Type in which the model computes; masters and sums are fp32. Changes numerics."""
    eval_interval: Steps | None = None
    """Steps between two validation losses. Default: none. No numerics."""
    eval_steps: Steps = 1
    """Global batches of one validation loss. No numerics."""
    balance_loss_weight: NotNegative = 1e-4
    """Weight of the sequence balance loss of the MoE layers; 0 leaves it out. Goes into the model's
    dims. Changes numerics."""
    indexer_loss_weight: NotNegative = 0.0
    """Weight of the loss that draws each indexer's scores of its picks to the attention that these
    get; 0 leaves the indexers as they are. Goes into the model's dims. Changes numerics."""
    routing_bias_rate: NotNegative = 0.0
    """Step of the sign rule that moves the routing bias; 0 leaves the bias alone. Changes
    numerics."""
    force_balanced_routing: bool = False
    """Route tokens to experts by arithmetic instead of by the router, for benches. Goes into the
    model's dims. Changes numerics."""


class Data(Section, frozen=True):
    """`[data]`: where tokens come from."""

    type: Literal["tokens", "stdlib", "random", "counting"] = "tokens"
    """tokens: a file that `ppruntime data build` made. stdlib: the Python standard library's
    sources as bytes, built on first use. random and counting: made up, for benches. Changes
    numerics."""
    path: str | None = None
    """Prefix of the token file (PREFIX.bin and PREFIX.idx), from the working directory. Default for
    stdlib: runs/data/stdlib-VERSION. Changes numerics."""
    validation_share: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    """Share of the documents that is held out for validation; the same ones for every seed.
    Changes numerics."""
    reset_positions: bool = True
    """Positions restart at each document, so that attention stays inside it. Changes numerics."""
    ignore_tokens: tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...] = ()
    """Token ids that are never a label (fill, end of document). Changes numerics."""


class Optim(Section, frozen=True):
    """`[optim]`: the optimizer and its learning rate: linear warm-up, then a cosine to min_lr."""

    type: Literal["adamw", "sign_sgd", "muon"] = "adamw"
    """Update rule. sign_sgd moves every weight by lr against its gradient's sign and keeps no
    state. muon is DeepSeek's recipe: momentum of each matrix made orthogonal, in
    train.precision, V4.1's embedding, head and Engram tables (these at 5 lr) balanced by rows and
    columns, AdamW for norms and vectors. Changes numerics."""
    apply_in_backward: bool = False
    """sign_sgd: update a stage's weights as soon as its backwards are through and their gradients
    reduced, unit by unit, and free these. Bitwise."""
    lr: Positive = 3e-4
    """Highest learning rate. Changes numerics."""
    min_lr: NotNegative = 0.0
    """Learning rate of the last step. Changes numerics."""
    warmup_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Steps over which the learning rate rises linearly to lr. Changes numerics."""
    betas: tuple[
        Annotated[float, Meta(ge=0, lt=1)],
        Annotated[float, Meta(ge=0, lt=1)],
    ] = (0.9, 0.95)
    """adamw, and what muon leaves to it: decay of the two moments. Changes numerics."""
    eps: Positive = 1e-8
    """adamw, and what muon leaves to it: added to the root of the second moment. DeepSeek trains
    with 1e-20. Changes numerics."""
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """muon: decay of momentum, a sum for matrices and an average for tables. Default: as DeepSeek
    trains. Changes numerics."""
    weight_decay: NotNegative = 0.1
    """Decay of matrices that multiply activations, decoupled; embedding, head, Engram tables and
    vectors have none, but with muon norm and Engram gate weights do. Changes numerics."""
    clip_norm: Positive | None = None
    """Gradients are scaled down to this global norm. Default: never. Changes numerics."""


class Checkpoint(Section, frozen=True):
    """`[checkpoint]`: when weights and optimizer are saved."""

    interval: Steps | None = None
    """Steps between two checkpoints. Default: only the last step. No numerics."""
    save_last: bool = True
    """Save the last step too. false is for runs whose weights nobody wants, as of a bench; one that
    is stopped is saved all the same. No numerics."""
    keep_last: Annotated[int, Meta(ge=2, le=65536)] = 3
    """Newest checkpoints that are kept. Two at least, so that one survives a failed save. No
    numerics."""
    resume: Literal["auto", "require", "never"] = "auto"
    """auto: go on if run.dir holds a checkpoint. require: refuse to start without one. never:
    refuse to start with one. No numerics."""


class Run(Section, frozen=True):
    """`[run]`: where a run writes, and on what it runs."""

    dir: str | None = None
    """Run directory; it resumes if it holds a checkpoint. Default: a new runs/NAME-NN. No
    numerics."""
    log_interval: Steps = 1
    """Steps between two progress lines. No numerics."""
    timeline_step: Annotated[int, Meta(ge=0)] | None = None
    """Step whose op times become the timeline, from 0. Default: the last one. No numerics."""
    memory_timeline: bool | None = None
    """Count live bytes around every op of that step, and write them beside the ledger's. Default:
    on CUDA, whose allocator counts anyway; a CPU step is slowed down by it. No numerics."""
    tensorboard: bool = True
    """Write TensorBoard events when the package is there. No numerics."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What the ranks compute on. Default: cuda where there is one per rank. Summation order."""
    num_threads: Annotated[int, Meta(ge=1, le=4096)] = 1
    """CPU threads of one rank's operators. Default: one, since ranks share the cores and one thread
    makes sums repeatable. Summation order."""
    backward_thread: Literal["autograd", "rank"] = "autograd"
    """Whose thread starts a backward's kernels on a GPU: autograd's own, or the rank's, which would
    only wait for it. rank took the host 3.9 ms for an FP8 MoE half's backward of 2,048 tokens under
    a profiler, the other 6.7 without one (H200, no record). Not measured in a pipeline. Bitwise."""


class ActivationCheckpointing(Section, frozen=True):
    """`[ac]`: which activations are recomputed in the backward instead of kept."""

    mode: RecomputeMode = "none"
    """What every half layer keeps beside its inputs. none: all, nothing is recomputed. full: what
    the routed experts got and gave. full_moe: nothing, experts run and send again. projections: as
    full, and the products with weights. attention: as full, and sparse attention's results. matmul:
    as full, and both. selective: what save names. All else is computed again in the backward.
    Default: the fastest. Bitwise."""
    save: tuple[str, ...] | None = None
    """Where the mode is selective, the results that are kept, and no others: groups of ops, or ops
    by their names. experts: rows sent to routed experts, their products and what comes back; left
    out, rows are sent again and experts run again. engram: Engram's rows and their projection.
    projections: the products with weights of all dense layers. attention: sparse attention's
    results, and what an indexer kernel picks. Of these mm (torch's products), wide_linear,
    fp8_linear, fp8_swiglu_linear, grouped_linear, rotated_linear; sparse_attention, index_select;
    engram_rows, engram_linear; fp8_experts, expert_rows, expert_linear, expert_counts,
    expert_dispatch, expert_combine, expert_tokens, expert_mega_moe. Of no group: rotate, rms_norm,
    mhc_read, mhc_write, one_stream_read, one_stream_write, gate_engram, route, mean_shares,
    shared_swiglu. What a run's kernels do not run as such an op is computed again. Default: the
    other modes say it. Bitwise."""
    recompute_engram: bool = False
    """Where the mode is full or full_moe, do not keep Engram's rows and their projection either.
    Bitwise."""
    layer_modes: dict[str, RecomputeMode | tuple[RecomputeMode, RecomputeMode]] | None = None
    """Other modes for some layers, by number in the whole model: one for both halves, or a pair
    for attention and MoE, as where a stage ends inside the layer: {"3" = ["none", "full"]}.
    Default: mode holds for all. Bitwise."""


class Engram(Section, frozen=True):
    """`[engram]`: Engram's tables, which lie in equal parts over all data ranks."""

    lookups_ahead: Annotated[int, Meta(ge=0, le=64)] = 0
    """Forwards of its stage by which a micro-batch's rows are looked up early, on a GPU on a stream
    beside the computations; they wait on the device until their own. Default: not early. Bitwise.
    """
    tables: Literal["device", "host"] = "device"
    """host: tables, their gradients and the optimizer's state of them lie in host memory; a GPU
    reads and adds single rows there, the CPU updates them with run.num_threads. Default: where the
    rest is. Bitwise on the CPU, summation order on a GPU."""


class Dispatch(Section, frozen=True):
    """`[moe.dispatch]`: how tokens reach their experts."""

    type: Literal["torch", "deep_ep", "mega_moe"] = "torch"
    """torch: all-to-all in plain PyTorch, a row per token and expert, runs everywhere. deep_ep: a
    row per token and rank by that package, inside a host. mega_moe: fused with the experts' own
    kernels, ranks of a host read and write each other's memory. Summation order (torch; mega_moe
    with FP8 experts); changes numerics (deep_ep: sums of a rank's experts are rounded to bf16;
    mega_moe with bf16 experts, where the routing weight goes in before the second product)."""
    fp8: bool = False
    """Tokens travel in FP8, one power-of-two scale per 128 values: half the bytes. mega_moe: as its
    experts multiply, whatever is said here. Bitwise with FP8 experts, else changes numerics."""
    fp8_grad: bool = False
    """Gradients of the experts' results do. Changes numerics."""
    weight_grads_after_combine: bool = False
    """Tokens' gradients are sent back before the experts' weight gradients are computed, not after:
    transfer and computation overlap. mega_moe: always. Bitwise."""
    token_chunks: Annotated[int, Meta(ge=1, le=8)] = 1
    """deep_ep: parts of a micro-batch; one is computed while the next is sent. Weight gradients are
    a sum over them, and each part counts for moe.compute.fused_wgrad_micro_batches. Default: one,
    since small parts make slow products. Summation order."""
    transfer_sms: Annotated[int, Meta(ge=2, le=64)] = 24
    """deep_ep: multiprocessors that its transfers run on, an even number; mega_moe: that pull rows
    while the others multiply. Default: deep_ep's fastest on H200, 0.48 ms a dispatch against 0.63
    with 20. Bitwise."""
    capacity_factor: Annotated[float, Meta(ge=1.0)] | None = None
    """mega_moe: most rows that a rank may get, over its fair share; where routing asks for more,
    all ranks end with the numbers. Default: it takes what comes. Bitwise."""


class ExpertCompute(Section, frozen=True):
    """`[moe.compute]`: how experts multiply."""

    backend: Literal["auto", "torch", "triton", "deep_gemm"] = "torch"
    """torch: plain PyTorch in the compute dtype, the reference, runs everywhere. triton: FP8 with
    own kernels. deep_gemm: FP8 with that package's GEMMs. auto: the last that works here. Changes
    numerics (FP8 backends)."""
    keep_expert_activations: bool = True
    """FP8: keep what the first GEMM gives for the backward, else run it again. Bitwise."""
    fp8_transposed_on_demand: bool | tuple[Annotated[int, Meta(ge=0)], ...] = False
    """FP8: turn the weights in each backward instead of keeping a turned copy, a byte a weight; a
    list names the stages that do. Bitwise."""
    free_bf16_expert_weights: bool | tuple[Annotated[int, Meta(ge=0)], ...] = False
    """FP8: free a step's gathered bf16 weights once their FP8 copies are made, two bytes a weight;
    a list names the stages that do. Bitwise."""
    wgrad_tile_scales: bool = False
    """FP8: one scale per 128 x 128 in weight gradients, less work. Changes numerics."""
    fused_wgrad_micro_batches: (
        Annotated[int, Meta(ge=1, le=4)] | tuple[Annotated[int, Meta(ge=1, le=4)], ...]
    ) = 1
    """FP8: micro-batches whose weight gradients are added in one launch; their operands wait. A
    list has one entry a stage. Bitwise with triton, and with deep_gemm where the own kernel adds
    them: on a Hopper, for widths that 256 divides; summation order elsewhere."""

    def turns_on_demand(self, stage: int) -> bool:
        """Whether a stage keeps no turned FP8 copy."""
        return _on_stage(self.fp8_transposed_on_demand, stage)

    def frees_weights(self, stage: int) -> bool:
        """Whether a stage frees its experts' gathered weights."""
        return _on_stage(self.free_bf16_expert_weights, stage)

    def num_fused(self, stage: int) -> int:
        """Micro-batches of a stage whose weight gradients are added in one launch."""
        fused = self.fused_wgrad_micro_batches
        return fused if isinstance(fused, int) else fused[stage]

    @property
    def turns(self) -> int:
        """Micro-batches after which all stages' launches of weight gradients repeat."""
        fused = self.fused_wgrad_micro_batches
        return fused if isinstance(fused, int) else math.lcm(*fused)


def _on_stage(choice: bool | tuple[int, ...], stage: int) -> bool:
    """Whether a stage does what all, none or the named stages do."""
    return choice if isinstance(choice, bool) else stage in choice


class Moe(Section, frozen=True):
    """`[moe]`: the mixture-of-experts layer."""

    dispatch: Dispatch = Dispatch()
    compute: ExpertCompute = ExpertCompute()


class Kernels(Section, frozen=True):
    """`[kernels]`: who computes what. `reference` is plain PyTorch, the yardstick of the others."""

    attention: Literal["auto", "reference", "triton", "library"] = "reference"
    """Sparse attention, with the inverse rotation of its output. triton: own kernels. library: the
    packages FlashMLA and cuDNN frontend. auto: the fastest that runs on the rank's device.
    Summation order."""
    attention_deterministic: bool = False
    """triton: sum the keys' gradient so that it is bitwise the same from run to run; slower.
    Summation order."""
    indexer: Literal["auto", "reference", "triton", "library"] = "reference"
    """Indexer scores and top-k. triton: own kernels. library: the package cuDNN frontend. Summation
    order of the scores; on equal scores bitwise."""
    mhc: Literal["reference", "triton", "auto"] = "reference"
    """What stands around a sublayer on the residual streams: projection, Sinkhorn, collapse and
    norm in one pass, write-back in another. auto: triton where it can run. Summation order."""
    rope: Literal["auto", "reference", "triton"] = "reference"
    """Rotation of the rotary channels; triton turns queries where their projection left them.
    Bitwise."""
    grouped_output: Literal["auto", "reference", "library"] = "reference"
    """Grouped first half of the output projection. library: BLAS group by group, without copies.
    Bitwise on the CPU, summation order on a GPU."""
    norm: Literal["auto", "reference", "triton"] = "reference"
    """RMSNorms of attention, one pass each way; those around a sublayer are mhc's if that is
    triton. Summation order."""
    compressor: Literal["auto", "reference", "library"] = "reference"
    """fp32 products of the compressors of ratios above 1. library: by bf16 products of parts of the
    weights, three times the work at ten times the rate; for bf16 models. Summation order."""
    router: Literal["auto", "reference", "library", "triton"] = "reference"
    """Routers. library: their fp32 products as the compressors'. triton: the same in bf16 models,
    and scores, picks, weights and balance shares in two passes each way. Summation order."""
    swiglu: Literal["auto", "reference", "triton"] = "reference"
    """Clamped SwiGLU of the shared expert, and of routed experts in the compute dtype, in one pass
    each way; in FP8 they have their own. Summation order."""
    engram: Literal["auto", "reference", "triton"] = "reference"
    """Engram's gate in one pass, and sums of its rows' gradients. auto: triton where it can run.
    Summation order."""
    linear: Literal["auto", "reference", "triton", "scaled_mm", "deep_gemm"] = "reference"
    """Query projections, second half of the output projection and shared expert. reference: in the
    compute dtype. The others: in FP8, 1 x 128 by 128 x 128, with own kernels, torch's block-scaled
    product (own where its K does not fit) or the package deep_gemm; auto: the fastest that works
    here. Changes numerics (FP8)."""
    linear_wgrad_tile_scales: bool = False
    """FP8 linears: in weight gradients one scale per 128 x 128 values of what a linear got, not one
    per 128 of a channel; products as fast as a forward's. Changes numerics."""
    head: Literal["reference", "chunked", "triton", "auto"] = "reference"
    """Projection to the vocabulary and cross-entropy. reference: all logits at once. chunked: some
    tokens' logits at a time, computed again in the backward; least memory, on any device. triton:
    their gradient is made in the forward and kept in bf16; fastest, for bf16 on a GPU. auto: triton
    where it can run, else chunked. Summation order."""
    compile: bool = False
    """Compiles what is left of each unit by torch.compile: norms, gates and other plain PyTorch
    between linears, experts and Engram, which stay as they are. Units that are recomputed stay
    plain. Changes numerics (rounding)."""


class Fault(Section, frozen=True):
    """`[fault]`: what happens when something goes wrong."""

    init_timeout_seconds: Seconds = 300.0
    """Longest wait for all ranks to join. No numerics."""
    stop_grace_seconds: Seconds = 25.0
    """How long the step under way may take to end, once SIGTERM or Ctrl-C has asked the run to
    stop; then it is saved. torchrun kills after 30 s, unless `--shutdown-timeout` says more. No
    numerics."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient norm that is not finite does: stop the run before the update, or skip
    the update and go on with the next step's data. Changes numerics."""
    nonfinite_max: Count = 3
    """skip: updates that may be skipped in a row; one more stops the run. No numerics."""


class Config(Section, frozen=True):
    """One run. Make it with `ppruntime.config.load`, which checks it."""

    model: Model
    pp: Pipeline = Pipeline()
    parallel: Parallel = Parallel()
    train: Train = Train()
    data: Data = Data()
    optim: Optim = Optim()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()
    ac: ActivationCheckpointing = ActivationCheckpointing()
    engram: Engram = Engram()
    moe: Moe = Moe()
    kernels: Kernels = Kernels()
    fault: Fault = Fault()

    @property
    def world_size(self) -> int:
        """Processes that the run needs: pp.size x dp x ep."""
        return self.pp.size * self.parallel.num_data_ranks

    @property
    def global_batch_size(self) -> int:
        """Sequences in one optimizer step, over all data ranks."""
        return (
            self.train.num_micro_batches
            * self.train.micro_batch_size
            * self.parallel.num_data_ranks
        )
