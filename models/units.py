"""Units: the model's half layers, its embedding and its head, each `Carry -> Carry`.

A model is `dims.unit_specs(dims)` in order; a stage builds its own part of that list.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ppruntime.models.attention import Attention
from ppruntime.models.attention_v4 import AttentionV4
from ppruntime.models.carry import CROSSING, Carry, MicroBatch
from ppruntime.models.dims import ModelDims, Role, UnitKind, UnitSpec
from ppruntime.models.engram import ALL_HERE, Engram, EngramOptions
from ppruntime.models.head import HeadLoss, whole_loss
from ppruntime.models.linear import Linear
from ppruntime.models.mhc import Coefficients, collapse
from ppruntime.models.mhc_v4 import HeadCollapse
from ppruntime.models.moe import HERE, MoE, MoEOptions
from ppruntime.models.norm import RMSNorm
from ppruntime.models.residual import UsesResidual


class EmbedUnit(nn.Module):
    """Token ids -> residual streams, all equal. The first sublayer reads stream 0 alone."""

    def __init__(
        self,
        dims: ModelDims,
        spec: UnitSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.spec = dims, spec
        shape = (dims.vocab_size, dims.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        embedded_BTD = functional.embedding(batch.ids, self.weight)
        num_streams = self.dims.num_streams
        streams_BTSD = embedded_BTD.unsqueeze(2).expand(-1, -1, num_streams, -1).contiguous()
        if not self.dims.hands_on_mix:
            return carry.changed(streams=streams_BTSD)
        mix_BTS = torch.zeros(
            *batch.ids.shape, num_streams, device=batch.ids.device, dtype=torch.float32
        )
        mix_BTS[..., 0] = 1
        return carry.changed(streams=streams_BTSD, mix=mix_BTS)


class AttentionUnit(UsesResidual):
    """The attention half of a layer, with the Engram before it if the layer has one."""

    def __init__(
        self,
        dims: ModelDims,
        spec: UnitSpec,
        *,
        engram: EngramOptions = ALL_HERE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert spec.layer is not None
        self.dims, self.spec = dims, spec
        self.engram = (
            Engram(dims, spec.layer, options=engram, device=device, dtype=dtype)
            if spec.layer in dims.engram_layers
            else None
        )
        self.add_connection(dims, device=device, dtype=dtype)
        self.norm = RMSNorm(dims.hidden_size, dims.norm_eps, device=device, dtype=dtype)
        self.attention = _attention(dims, spec.layer, device=device, dtype=dtype)

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        streams_BTSD = _streams(carry)
        if self.engram is not None:
            streams_BTSD = self.engram(streams_BTSD, batch.ids, batch.positions, batch.masked)
        mix_BTS = _input_mix(self.dims, carry)
        x_BTD, streams_BTSD, weights = self.residual.read(
            self.connection, self.norm, streams_BTSD, mix_BTS
        )
        y_BTD, carry = self.attention(x_BTD, carry, batch)
        streams_BTSD = self.residual.write(streams_BTSD, y_BTD, weights)
        return _passed_on(self.dims, self.spec, carry, streams_BTSD, weights)


class MoEUnit(UsesResidual):
    """The MoE half of a layer."""

    def __init__(
        self,
        dims: ModelDims,
        spec: UnitSpec,
        *,
        options: MoEOptions = HERE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.spec = dims, spec
        self.add_connection(dims, device=device, dtype=dtype)
        self.norm = RMSNorm(dims.hidden_size, dims.norm_eps, device=device, dtype=dtype)
        self.moe = MoE(
            dims,
            by_token_id=spec.role is Role.HASH,
            options=options,
            device=device,
            dtype=dtype,
        )

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        streams_BTSD = _streams(carry)
        mix_BTS = _input_mix(self.dims, carry)
        x_BTD, streams_BTSD, weights = self.residual.read(
            self.connection, self.norm, streams_BTSD, mix_BTS
        )
        y_BTD, balance_loss, loads_E = self.moe(x_BTD, batch.ids)
        if balance_loss is not None and carry.balance_loss is not None:
            balance_loss = carry.balance_loss + balance_loss
        carry = carry.changed(balance_loss=balance_loss, loads=(*carry.loads, loads_E))
        streams_BTSD = self.residual.write(streams_BTSD, y_BTD, weights)
        return _passed_on(self.dims, self.spec, carry, streams_BTSD, weights)


class HeadUnit(nn.Module):
    """Final norm, logits and the summed loss. V4 collapses mHC's streams by a module of its own.

    `loss_of` computes the loss: `head.whole_loss` unless a stage's builder puts another in.
    """

    loss_of: HeadLoss = staticmethod(whole_loss)

    def __init__(
        self,
        dims: ModelDims,
        spec: UnitSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dims, self.spec = dims, spec
        self.collapse = _head_collapse(dims, device=device, dtype=dtype)
        self.norm = RMSNorm(dims.hidden_size, dims.norm_eps, device=device, dtype=dtype)
        self.projection = Linear(
            dims.hidden_size, dims.vocab_size, device=device, dtype=dtype, fp32_output=True
        )

    def logits(self, carry: Carry) -> Tensor:
        """[B, T, vocabulary] fp32."""
        logits: Tensor = self.projection(self._hidden(carry))
        return logits

    def forward(self, carry: Carry, batch: MicroBatch) -> Carry:
        loss = self.loss_of(self._hidden(carry), self.projection, batch.labels)
        crossing: dict[str, Any] = dict.fromkeys(CROSSING)
        return carry.changed(**crossing, loss=loss)

    def _hidden(self, carry: Carry) -> Tensor:
        """[B, T, D]: the collapsed streams after the final norm."""
        streams_BTSD = _streams(carry)
        if self.dims.residual_type != "mhc":
            normed_BTD: Tensor = self.norm(streams_BTSD.squeeze(-2))
            return normed_BTD
        mix_BTS = carry.mix if self.collapse is None else self.collapse(streams_BTSD)
        assert mix_BTS is not None, "the head has no mix in its carry"
        hidden_BTD: Tensor = self.norm(collapse(streams_BTSD, mix_BTS))
        return hidden_BTD


Unit: TypeAlias = EmbedUnit | AttentionUnit | MoEUnit | HeadUnit
"""`forward(carry, batch) -> carry`; `spec` says what it is."""


def build_unit(
    dims: ModelDims,
    spec: UnitSpec,
    *,
    moe: MoEOptions = HERE,
    engram: EngramOptions = ALL_HERE,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Unit:
    """One unit with memory for its parameters, not yet filled (`init.init_parameters` does that).

    `dtype` is the compute dtype; parameters that need it stay fp32 (`precision.holder_dtype`).
    """
    if spec.kind is UnitKind.MOE:
        return MoEUnit(dims, spec, options=moe, device=device, dtype=dtype)
    if spec.kind is UnitKind.ATTENTION:
        return AttentionUnit(dims, spec, engram=engram, device=device, dtype=dtype)
    return _CLASSES[spec.kind](dims, spec, device=device, dtype=dtype)


_CLASSES: dict[UnitKind, type[Unit]] = {
    UnitKind.EMBED: EmbedUnit,
    UnitKind.HEAD: HeadUnit,
}


def _attention(
    dims: ModelDims,
    layer: int,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module:
    if dims.family == "v41":
        return Attention(dims, layer, device=device, dtype=dtype)
    return AttentionV4(dims, layer, device=device, dtype=dtype)


def _head_collapse(
    dims: ModelDims, *, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Module | None:
    """V4: streams [B, T, S, D] -> mix [B, T, S]; V4.1 uses the last sublayer's mix. One stream is
    what it is."""
    if dims.family == "v41" or dims.residual_type != "mhc":
        return None
    return HeadCollapse(dims, device=device, dtype=dtype)


def _streams(carry: Carry) -> Tensor:
    """The streams behind one autograd edge: their gradient is one sum, formed inside the unit, and
    so the same bits whether the unit before is in this process or not."""
    assert carry.streams is not None, "a unit after the embedding has no streams in its carry"
    return carry.streams.view_as(carry.streams)


def _input_mix(dims: ModelDims, carry: Carry) -> Tensor | None:
    """Weights that collapse the streams: the sublayer before computed them; None in V4, where this
    one does, and where there is one stream."""
    if not dims.hands_on_mix:
        return None
    assert carry.mix is not None, "a V4.1 unit has no mix in its carry"
    return carry.mix


def _passed_on(
    dims: ModelDims,
    spec: UnitSpec,
    carry: Carry,
    streams_BTSD: Tensor,
    weights: Coefficients | Tensor,
) -> Carry:
    """The carry after a sublayer: its streams, its mix, and of the rest what is alive."""
    dead: dict[str, Any] = {field: None for field in CROSSING if field not in spec.live_after}
    return carry.changed(
        streams=streams_BTSD,
        mix=weights.pre_BTS if isinstance(weights, Coefficients) and dims.hands_on_mix else None,
    ).changed(**dead)
