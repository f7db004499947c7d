"""A unit's times from kernels that were measured alone, and models for what was not. No torch.

`kernel_records` reads the benches' records. A unit is a list of pieces, each measured (a bench's
row), modelled (bytes or FLOPs at a rate that a bench measured) or assumed; new records change the
numbers, not this file.
"""

from __future__ import annotations

from ppruntime.config import Config
from ppruntime.memory import gradient_bytes
from ppruntime.models.dims import (
    ModelDims,
    Role,
    UnitKind,
    UnitSpec,
    boundary_bytes,
    forward_flops_per_token,
    preset,
    unit_parameters,
    unit_specs,
)
from ppruntime.models.parameters import Part
from ppruntime.models.update_rules import newton_schulz_flops, update_rule
from ppruntime.projection.calibration import (
    Calibration,
    PerStep,
    Slowdown,
    TransferTimes,
    UnitTimes,
    changed_sizes,
    unit_type,
)
from ppruntime.projection.kernel_records import HEAD_SIZES, RECORDED, Kernels, PartTimes
from ppruntime.projection.pipeline import Piece
from ppruntime.projection.projector import Origin

IB_BYTES_PER_S = 46e9
"""What one GPU's InfiniBand moves one way; published for the same machines, not measured here."""
MODES = ("none", "full_moe")

_ATTENTION_SIZES = (
    *("hidden_size", "num_heads", "head_dim", "q_lora_rank", "index_heads", "index_head_dim"),
    *("o_groups", "o_lora_rank", "num_streams", "window", "index_topk"),
)
_STREAMS = 4
"""Residual streams of the bench's mHC."""
_INDEX_SHARE = 0.25
"""Assumed share of the bf16 rate at which index scores and their top-k run."""


def unit_pieces(config: Config, spec: UnitSpec, mode: str, kernels: Kernels) -> tuple[Piece, ...]:
    """All that a unit does for one micro-batch on one rank, piece by piece; with mode "full_moe"
    the forward comes again in the input gradient, all of it."""
    assert mode in MODES, f"no times of mode {mode}: {MODES}"
    pieces = _forward_pieces(config, spec, kernels)
    if mode == "full_moe" and spec.layer is not None:
        pieces += tuple(
            Piece(f"{p.name}, again", 0.0, p.forward_s, 0.0, p.origin, p.source) for p in pieces
        )
    return pieces


def kernel_calibration(config: Config, kernels: Kernels, transport: str) -> Calibration:
    """The same as rows of a calibration, for one transport: each unit a sum of pieces, so modelled
    at best. Hops go over InfiniBand."""
    dims = config.model.dims
    units: dict[tuple[str, str], UnitTimes] = {}
    for spec in unit_specs(dims):
        for mode in MODES:
            key = (unit_type(dims, spec), mode)
            pieces = unit_pieces(config, spec, mode, kernels)
            if key in units:
                continue
            units[key] = UnitTimes(
                unit=key[0],
                ac_mode=mode,
                forward_s=sum(p.forward_s for p in pieces),
                input_grad_s=sum(p.input_grad_s for p in pieces),
                weight_grad_s=sum(p.weight_grad_s for p in pieces),
                origin=_least(pieces).value,
                source="; ".join(sorted({f"{p.origin} {p.name}" for p in pieces})),
            )
    sizes = set()
    for spec in unit_specs(dims)[:-1]:
        train = config.train
        sizes.add(boundary_bytes(dims, spec, train.micro_batch_size, train.seq_len))
        sizes.add(gradient_bytes(config, spec))
    slows = kernels.interference[transport]
    return Calibration(
        schema=1,
        command="ppruntime headline",
        device=kernels.device,
        versions={},
        date=max(kernels.dates),
        model=config.model.name,
        sizes=changed_sizes(config),
        seq_len=config.train.seq_len,
        micro_batch_size=config.train.micro_batch_size,
        ep=config.parallel.ep,
        transport="idle",
        routing="balanced, in the experts' bench",
        seeds=(0,),
        zero_weights=False,
        profiled=False,
        units=tuple(units.values()),
        transfers=tuple(
            TransferTimes(
                link="ib",
                num_bytes=size,
                seconds=size / IB_BYTES_PER_S,
                origin="assumed",
                source="46 GB/s, published",
            )
            for size in sorted(sizes)
            if size
        ),
        per_step=per_step_rows(config, kernels),
        slowdowns=(
            Slowdown(
                transport=transport,
                one_way=slows.one_way,
                both_ways=slows.both_ways,
                origin="modelled",
                source="measured between two GPUs over NVLink, taken for InfiniBand",
            ),
        ),
    )


def per_step_rows(config: Config, kernels: Kernels) -> tuple[PerStep, ...]:
    """Of the busiest rank: quantising its experts' weights, the optimizer by bytes and FLOPs, the
    norm."""
    dims = config.model.dims
    most_blocks = max(1, -(-dims.num_layers // config.pp.size))
    per_block = _expert_parameters(dims) / config.parallel.ep
    shard = most_blocks * per_block / config.parallel.dp
    return (
        PerStep(
            name="quantise",
            seconds=most_blocks * weight_scale(config) * kernels.experts.quantise_s,
            origin="modelled",
            source=f"{most_blocks} MoE blocks x measured {1e3 * kernels.experts.quantise_s:.2f} ms",
        ),
        _optimizer_row(config, kernels, shard, most_blocks),
        PerStep(name="norm", seconds=0.01, origin="assumed", source="one all-reduce of all ranks"),
    )


_UPDATE_BYTES = {"adamw": 28, "sign_sgd": 12, "muon": 100}
"""Read and written to update a parameter: AdamW and SignSGD in one pass, Muon in one for each
operation, its products apart."""


def _optimizer_row(
    config: Config, kernels: Kernels, num_parameters: float, num_blocks: int
) -> PerStep:
    """The update of a rank's own experts, so many parameters in all of `num_blocks` layers."""
    kind, parallel = config.optim.type, config.parallel
    seconds = _UPDATE_BYTES[kind] * num_parameters / kernels.memory_bytes_per_s
    source = f"{_UPDATE_BYTES[kind]} bytes of each of a rank's own parameters at the copy rate"
    if kind == "muon":
        flops = _orthogonalise_flops(config.model.dims) * num_blocks / (parallel.dp * parallel.ep)
        seconds += flops / kernels.bf16_flops
        source += f", {flops:.2e} FLOPs of Newton-Schulz at the measured bf16 rate"
    return PerStep(
        name="optimizer", seconds=seconds, origin="modelled", source=f"{source} ({kind})"
    )


def _orthogonalise_flops(dims: ModelDims) -> float:
    """For all routed experts of a layer."""
    spec = next(unit for unit in unit_specs(dims) if unit.kind is UnitKind.MOE)
    return sum(
        p.shape[0] * newton_schulz_flops(update_rule(dims, p), p.shape[-1])
        for p in unit_parameters(dims, spec)
        if p.part is Part.EXPERTS
    )


def _forward_pieces(config: Config, spec: UnitSpec, kernels: Kernels) -> tuple[Piece, ...]:
    dims, train = config.model.dims, config.train
    tokens = train.micro_batch_size * train.seq_len
    flops = forward_flops_per_token(dims, spec, train.seq_len)
    matmul = flops.matmul
    pieces: list[Piece] = []
    if spec.kind is UnitKind.MOE:
        experts = kernels.experts
        scale = expert_scale(config, kernels)
        is_like = scale == weight_scale(config) == 1 and _is_like(
            dims, "hidden_size", "expert_width"
        )
        pieces.append(
            Piece(
                "experts",
                scale * experts.forward_s,
                scale * experts.input_grad_s,
                scale * experts.weight_grad_s,
                Origin.MEASURED if is_like else Origin.MODELLED,
                experts.source
                if is_like
                else f"{experts.source}, x {scale:.3g} by rows and widths",
            )
        )
        pieces.append(_dispatch(config, kernels))
        if (around := _around_experts(dims, tokens, kernels)) is not None:
            return (*pieces, around)
        matmul -= 2.0 * dims.experts_per_token * 3 * dims.hidden_size * dims.expert_width
    elif spec.kind is UnitKind.ATTENTION and (half := _half(dims, spec, tokens, kernels)):
        return (half, *_engram(config, spec, kernels))
    elif spec.kind is UnitKind.ATTENTION:
        slots = round(flops.attention / (4.0 * dims.num_heads * dims.head_dim))
        pieces.append(_core(dims, slots, tokens, kernels))
        if flops.index_scores:
            seconds = flops.index_scores * tokens / (_INDEX_SHARE * kernels.bf16_flops)
            source = f"index scores and top-k at {_INDEX_SHARE:.0%} of the bf16 rate"
            pieces.append(Piece("indexer", seconds, 0.0, 0.0, Origin.ASSUMED, source))
        if spec.engram_parameters:
            pieces.append(_lookups(dims, tokens))
    elif spec.kind is UnitKind.HEAD and (head := _whole_head(dims, tokens, kernels)):
        return (head,)
    elif spec.kind is UnitKind.HEAD and "head" in kernels.parts:
        return (_measured("head", kernels.parts["head"], tokens, size=_head_size(dims)),)
    if matmul > 0 and spec.kind is not UnitKind.EMBED:
        seconds = matmul * tokens / kernels.bf16_flops
        source = f"FLOPs at the measured bf16 rate, {kernels.bf16_flops / 1e12:.0f} TFLOP/s"
        pieces.append(Piece("dense", seconds, seconds, seconds, Origin.MODELLED, source))
    if spec.layer is not None and "mhc" in kernels.parts and dims.num_streams == _STREAMS:
        width = dims.hidden_size / preset(RECORDED).hidden_size
        pieces.append(_measured("streams and norms", kernels.parts["mhc"], tokens, size=width))
    elif spec.layer is not None:
        pieces.append(_streams(dims, tokens, kernels))
    return tuple(pieces)


def _half(dims: ModelDims, spec: UnitSpec, tokens: int, kernels: Kernels) -> Piece | None:
    """The whole half as the bench ran it, without an Engram; None where no row is like it.

    Halves that reuse keys were measured at ratio 1 alone. At another ratio they read as many slots,
    of a shorter list: the same time, but not the same half.
    """
    assert spec.layer is not None
    ratio = dims.compress_ratios[spec.layer]
    kind = f"Full ratio {ratio}" if spec.role is Role.FULL else str(spec.role).capitalize()
    kind = "SWA" if spec.role is Role.SWA else kind
    part = kernels.halves.get(kind)
    if part is None or part.tokens != tokens or not _is_like(dims, *_ATTENTION_SIZES):
        return None
    is_like = ratio <= 1 or spec.role is Role.FULL
    note = "" if is_like else f", taken for ratio {ratio}"
    return _measured("attention half", part, tokens, note)


def _around_experts(dims: ModelDims, tokens: int, kernels: Kernels) -> Piece | None:
    """Streams, norm, router, shared expert and sums: a MoE half as it was measured, less its routed
    experts alone. None where the half was of another model or size."""
    half, experts = kernels.moe_half, kernels.experts
    sizes = (dims.hidden_size, dims.expert_width, dims.num_experts, dims.num_streams)
    if half is None or half.tokens != tokens or sizes != (5120, 2304, 384, _STREAMS):
        return None
    if half.tokens * dims.experts_per_token != experts.rows:
        return None
    return Piece(
        "around the experts",
        max(0.0, half.forward_s - experts.forward_s),
        max(0.0, half.input_grad_s - experts.input_grad_s),
        max(0.0, half.weight_grad_s - experts.weight_grad_s),
        Origin.MEASURED,
        f"{half.source}, less the experts of {experts.source}",
    )


def _measured(
    name: str, part: PartTimes, tokens: int, note: str = "", *, size: float = 1.0
) -> Piece:
    """A part that was measured as a whole; by tokens where there are others, and by its `size` over
    that of the bench's."""
    scale = tokens / part.tokens
    if scale != 1:
        note += f", x {scale:.3g} by tokens"
    if size != 1:
        note += f", x {size:.3g} by width"
    scale *= size
    return Piece(
        name,
        scale * part.forward_s,
        scale * part.input_grad_s,
        scale * part.weight_grad_s,
        Origin.MODELLED if note else Origin.MEASURED,
        part.source + note,
    )


def _whole_head(dims: ModelDims, tokens: int, kernels: Kernels) -> Piece | None:
    """Final norm, head and loss as one unit; None where it was of other sizes or tokens."""
    head = kernels.head
    if head is None or head.tokens != tokens or not _is_like(dims, *HEAD_SIZES):
        return None
    return _measured("head", head, tokens)


def _head_size(dims: ModelDims) -> float:
    recorded = preset(RECORDED)
    return dims.hidden_size * dims.vocab_size / (recorded.hidden_size * recorded.vocab_size)


def _engram(config: Config, spec: UnitSpec, kernels: Kernels) -> tuple[Piece, ...]:
    """What an Engram adds to a half that was measured without: lookups, projection, gate."""
    if not spec.engram_parameters:
        return ()
    dims = config.model.dims
    tokens = config.train.micro_batch_size * config.train.seq_len
    rows = (dims.engram_max_order - 1) * dims.engram_heads * dims.engram_head_dim
    products = 2.0 * rows * (dims.num_streams + 1) * dims.hidden_size * tokens
    seconds = products / kernels.bf16_flops
    source = f"FLOPs at the measured bf16 rate, {kernels.bf16_flops / 1e12:.0f} TFLOP/s"
    pieces = [
        _lookups(dims, tokens),
        Piece("engram projection", seconds, seconds, seconds, Origin.MODELLED, source),
    ]
    if "engram gate" in kernels.parts:
        width = dims.hidden_size / preset(RECORDED).hidden_size
        gate = kernels.parts["engram gate"]
        pieces.append(_measured("engram gate", gate, tokens, size=width))
    return tuple(pieces)


def _lookups(dims: ModelDims, tokens: int) -> Piece:
    rows = tokens * (dims.engram_max_order - 1) * dims.engram_heads * dims.engram_head_dim
    seconds = 2 * rows / IB_BYTES_PER_S
    source = "bf16 table rows over InfiniBand at 46 GB/s, nothing hidden"
    return Piece("engram lookups", seconds, seconds, 0.0, Origin.ASSUMED, source)


def _dispatch(config: Config, kernels: Kernels) -> Piece:
    """To the experts' ranks and back: a token once per rank that has one of its experts."""
    dims, ep = config.model.dims, config.parallel.ep
    tokens = config.train.micro_batch_size * config.train.seq_len
    copies = remote_copies(dims, ep, 1)
    rate = kernels.nvlink_bytes_per_s["put"]
    there, back = tokens * copies * dims.hidden_size, 2 * tokens * copies * dims.hidden_size
    source = f"FP8 there, bf16 back (bf16 both for gradients), {copies:.2f} copies a token, NVLink"
    return Piece("dispatch", (there + back) / rate, 2 * back / rate, 0.0, Origin.MODELLED, source)


def remote_copies(dims: ModelDims, num_ranks: int, ranks_per_place: int) -> float:
    """Mean number of places other than its own that a token goes to, if its experts are drawn
    evenly: places are groups of ranks, one copy to each."""
    places = num_ranks // ranks_per_place
    reached = places * (1 - (1 - 1 / places) ** dims.experts_per_token)
    return reached * (places - 1) / places if places > 1 else 0.0


def _core(dims: ModelDims, slots: int, tokens: int, kernels: Kernels) -> Piece:
    """The bench's row for so many slots; between two rows a line through them."""
    known = sorted(kernels.attention_s)
    low, high = known[0], known[-1]
    recorded = preset(RECORDED)
    size = dims.num_heads * dims.head_dim / (recorded.num_heads * recorded.head_dim)
    part = 0.0 if high == low else (slots - low) / (high - low)
    scale = size * tokens / kernels.attention_tokens
    forward, backward = (
        scale * (kernels.attention_s[low][i] * (1 - part) + kernels.attention_s[high][i] * part)
        for i in (0, 1)
    )
    exact = slots in kernels.attention_s and scale == 1
    source = f"layers-attention.json, hopper, {slots} slots, {kernels.attention_samples} samples"
    origin = Origin.MEASURED if exact else Origin.MODELLED
    return Piece("attention", forward, backward, 0.0, origin, source)


def _streams(dims: ModelDims, tokens: int, kernels: Kernels) -> Piece:
    """Collapse, norm and write-back of the residual streams: bytes at the copy rate."""
    item = 2.0 * tokens * dims.hidden_size
    forward = (3 * dims.num_streams + 4) * item / kernels.memory_bytes_per_s
    source = f"bytes at the measured copy rate, {kernels.memory_bytes_per_s / 1e12:.2f} TB/s"
    return Piece("streams and norms", forward, 2 * forward, 0.0, Origin.MODELLED, source)


def _expert_parameters(dims: ModelDims) -> float:
    return dims.num_experts * 3.0 * dims.hidden_size * dims.expert_width


def expert_scale(config: Config, kernels: Kernels) -> float:
    """Products of a rank and micro-batch here over those of the bench: rows and widths."""
    dims, recorded = config.model.dims, preset(RECORDED)
    tokens = config.train.micro_batch_size * config.train.seq_len
    rows = tokens * dims.experts_per_token / kernels.experts.rows
    widths = dims.hidden_size * dims.expert_width
    return rows * widths / (recorded.hidden_size * recorded.expert_width)


def weight_scale(config: Config) -> float:
    """Routed experts' parameters of a rank here over those of the bench, one of eight ranks."""
    mine = _expert_parameters(config.model.dims) / config.parallel.ep
    return mine / (_expert_parameters(preset(RECORDED)) / 8)


def _is_like(dims: ModelDims, *names: str) -> bool:
    """Whether these sizes are those of the model that the benches ran."""
    recorded = preset(RECORDED)
    return all(getattr(dims, name) == getattr(recorded, name) for name in names)


def _least(pieces: tuple[Piece, ...]) -> Origin:
    assumed = any(piece.origin is Origin.ASSUMED for piece in pieces)
    return Origin.ASSUMED if assumed or not pieces else Origin.MODELLED
