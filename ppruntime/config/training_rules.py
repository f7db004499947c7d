"""What has to hold between the keys that feed, update and evaluate."""

from __future__ import annotations

from collections.abc import Iterator

from ppruntime.config.errors import show
from ppruntime.config.keys import Config, Data, Fault, Optim, Train
from ppruntime.config.rule import Broken, Rule
from ppruntime.models.dims import Role, attention_role


def _data_path(config: Config) -> Iterator[Broken]:
    if config.data.type == "tokens" and config.data.path is None:
        yield (
            "data.path",
            'data.path is missing, data.type = "tokens" needs the prefix of a token file; make '
            'one with "ppruntime data build --out PREFIX FILES", or use data.type = "stdlib"',
        )


def _made_up_data(config: Config) -> Iterator[Broken]:
    if config.data.type not in ("random", "counting"):
        return
    for name in ("path", "validation_share", "reset_positions", "ignore_tokens"):
        if getattr(config.data, name) != getattr(Data(), name):
            yield (
                f"data.{name}",
                f"data.{name} has no effect on data.type = {show(config.data.type)}, which makes "
                "its tokens up; leave it out",
            )


def _evaluation(config: Config) -> Iterator[Broken]:
    train = config.train
    if train.eval_interval is None:
        if train.eval_steps != Train().eval_steps:
            yield (
                "train.eval_steps",
                f"train.eval_steps = {train.eval_steps} has no effect without "
                "train.eval_interval; set both or neither",
            )
    elif config.data.validation_share == 0:
        yield (
            "train.eval_interval",
            f"train.eval_interval = {train.eval_interval} needs documents to evaluate on, and "
            "data.validation_share is 0; set it to a share such as 0.01",
        )


def _sign_sgd(config: Config) -> Iterator[Broken]:
    optim = config.optim
    if optim.type != "sign_sgd":
        if optim.apply_in_backward:
            yield (
                "optim.apply_in_backward",
                f"optim.apply_in_backward = true does not work with optim.type ="
                f' {show(optim.type)}, only with "sign_sgd", whose updates need no other gradient;'
                " leave it out",
            )
        return
    for name in ("betas", "eps", "clip_norm"):
        value = getattr(optim, name)
        if name == "clip_norm" and optim.apply_in_backward:
            continue
        if value != getattr(Optim(), name):
            yield (
                f"optim.{name}",
                f'optim.{name} = {show(value)} has no effect on optim.type = "sign_sgd", which'
                " reads nothing but signs; leave it out",
            )
    if not optim.apply_in_backward:
        return
    if optim.clip_norm is not None:
        yield (
            "optim.clip_norm",
            f"optim.clip_norm = {show(optim.clip_norm)} needs all gradients before the first"
            " update, and optim.apply_in_backward = true frees them one by one; leave one of them"
            " out",
        )
    if config.fault.nonfinite != "stop":
        yield (
            "fault.nonfinite",
            f"fault.nonfinite = {show(config.fault.nonfinite)} needs all gradients before the first"
            ' update, and optim.apply_in_backward = true frees them one by one; use "stop"',
        )


def _muon(config: Config) -> Iterator[Broken]:
    optim = config.optim
    if optim.type != "muon" and optim.momentum != Optim().momentum:
        yield (
            "optim.momentum",
            f"optim.momentum = {optim.momentum:g} has no effect on optim.type ="
            f' {show(optim.type)}; leave it out, or use "muon"',
        )


def _nonfinite_max(config: Config) -> Iterator[Broken]:
    fault, key = config.fault, "fault.nonfinite_max"
    if fault.nonfinite != "skip" and fault.nonfinite_max != Fault().nonfinite_max:
        yield (
            key,
            f"{key} = {fault.nonfinite_max} has no effect on fault.nonfinite ="
            f' {show(fault.nonfinite)}; leave it out, or use "skip"',
        )


def _learning_rate(config: Config) -> Iterator[Broken]:
    optim = config.optim
    if optim.min_lr > optim.lr:
        yield (
            "optim.min_lr",
            f"optim.min_lr = {optim.min_lr:g} is above optim.lr = {optim.lr:g}; it is where the "
            "learning rate ends, at most optim.lr",
        )


def _learning_rate_warmup(config: Config) -> Iterator[Broken]:
    warmup_steps, steps = config.optim.warmup_steps, config.train.steps
    if warmup_steps > steps:
        yield (
            "optim.warmup_steps",
            f"optim.warmup_steps = {warmup_steps} is more than train.steps = {steps}; the "
            "learning rate would never reach optim.lr",
        )


def _routing(config: Config) -> Iterator[Broken]:
    train = config.train
    if train.force_balanced_routing and train.routing_bias_rate:
        yield (
            "train.routing_bias_rate",
            f"train.routing_bias_rate = {train.routing_bias_rate:g} has no effect with "
            "train.force_balanced_routing = true; leave one of them out",
        )


def _indexer_loss(config: Config) -> Iterator[Broken]:
    dims = config.model.dims
    key, weight = "train.indexer_loss_weight", config.train.indexer_loss_weight
    roles = {attention_role(dims, layer) for layer in range(len(dims.compress_ratios))}
    if weight and not roles & {Role.FULL, Role.REINDEX, Role.CSA}:
        yield key, f"{key} = {weight:g} has no effect: no layer has an indexer; leave it out"


TRAINING_RULES: tuple[Rule, ...] = (
    _data_path,
    _made_up_data,
    _evaluation,
    _sign_sgd,
    _muon,
    _nonfinite_max,
    _learning_rate,
    _learning_rate_warmup,
    _routing,
    _indexer_loss,
)
