"""TorchTitan's MoE models with our layer: its ModelSpecs, each RoutedExperts node replaced."""

import difflib
import importlib
import warnings
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

from torchtitan.models import _supported_models
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.protocols.model_spec import ModelSpec

from titan_mega_moe import routed_experts
from titan_mega_moe.op.backends import UPSTREAM
from titan_mega_moe.parallelize import parallelize
from titan_mega_moe.routed_experts import MegaMoEOptions, replace_routed_experts


def model_spec(
    name: str,
    flavor: str,
    *,
    attn_backend: str | None = None,
    layers: int | None = None,
    options: MegaMoEOptions,
) -> ModelSpec:
    """Upstream's spec of a family's flavor with the layer in it.

    Args:
        name: a directory of torchtitan.models, such as "qwen3".
        flavor: as upstream spells it, such as "30B-A3B".
        attn_backend: as upstream's model_registry takes it; None: the family's default.
        layers: keep the first N decoder layers, for a cut-down run; None: all.
        options: how the layer runs; a backend of UPSTREAM leaves upstream's layer in place, with the
            dispatcher that it names.

    Raises:
        ValueError: the model does not qualify, for the reason that `refusal_reason` gives, or `layers` is
            out of range or leaves no MoE layer.
    """
    if (reason := refusal_reason(name, flavor)) is not None:
        raise ValueError(reason)
    spec = _upstream_spec(name, flavor, attn_backend, UPSTREAM.get(options.backend))
    if layers is not None:
        _keep_layers(spec, layers)
    return with_mega_moe(spec, options)


def with_mega_moe(spec: ModelSpec, options: MegaMoEOptions) -> ModelSpec:
    """`spec` with the layer in place of every RoutedExperts, and buffers allocated when it is parallelized.

    The model config inside is changed in place. Raises ValueError if a node cannot be replaced.
    """
    if options.backend in UPSTREAM:
        return spec
    for _, config, parent, attribute in list(spec.traverse(RoutedExperts.Config)):
        setattr(parent, attribute, replace_routed_experts(config, options))
    return replace(spec, parallelize_fn=partial(parallelize, upstream=spec.parallelize_fn))


@cache
def families() -> dict[str, list[str]]:
    """Every family with the flavors that qualify; families without one are left out."""
    found = {
        name: [flavor for flavor in _flavors(name) if refusal_reason(name, flavor) is None]
        for name in sorted(_supported_models)
        if _import_error(name) is None
    }
    return {name: flavors for name, flavors in found.items() if flavors}


@cache
def refusal_reason(name: str, flavor: str) -> str | None:
    """One sentence on why the model cannot be trained with the layer, or None when it can."""
    if name not in _supported_models:
        return f"model {name!r} is not known; {_nearest(name, sorted(_supported_models))}"
    if (error := _import_error(name)) is not None:
        return f"model {name!r} cannot be imported here: {error}"
    flavors = _flavors(name)
    if flavor not in flavors:
        return f"model {name!r} has no flavor {flavor!r}; {_nearest(flavor, flavors)}"
    spec = _upstream_spec(name, flavor)
    nodes = [node for _, node, _, _ in spec.traverse(RoutedExperts.Config)]
    if not nodes:
        return f"model {name!r} {flavor!r} has no mixture of experts"
    for node in nodes:
        if (reason := routed_experts.refusal_reason(node)) is not None:
            return f"model {name!r} {flavor!r} cannot use the layer: {reason}"
    return None


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"torchtitan.models.{name}")


def _import_error(name: str) -> ImportError | None:
    """What a family lacks here: qwen3_5 needs flash-linear-attention."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what the family's dependencies find here
            _module(name)
    except ImportError as error:
        return error
    return None


def _flavors(name: str) -> list[str]:
    # Each family keeps its flavors in a dict of its own name: qwen3_configs, deepseekv3_configs, ...
    tables = (v for k, v in vars(_module(name)).items() if k.endswith("_configs") and isinstance(v, dict))
    return list(next(tables))


def _upstream_spec(name: str, flavor: str, attn_backend: str | None = None, dispatcher: str | None = None) -> ModelSpec:
    asked = {"attn_backend": attn_backend, "moe_comm_backend": dispatcher}
    kwargs: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
    return _module(name).model_registry(flavor, **kwargs)


def _keep_layers(spec: ModelSpec, layers: int) -> None:
    model: Any = spec.model
    if not 1 <= layers <= len(model.layers):
        raise ValueError(
            f"model.layers is {layers}; {spec.name} {spec.flavor} has {len(model.layers)} layers to keep from"
        )
    model.layers = model.layers[:layers]
    if not any(spec.traverse(RoutedExperts.Config)):
        raise ValueError(f"model.layers is {layers}; the first {layers} of {spec.flavor} have no experts: keep more")


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
