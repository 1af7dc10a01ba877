"""What a TOML may hold, read off the dataclasses of torchtitan's Trainer.Config, and the way there and back.

`structure` makes a dataclass of a table, `unstructure` a table of a dataclass, `leaf` finds the type of one
dotted key for the command line. Nothing here restates a torchtitan key: names, types and defaults come from
the dataclasses themselves.
"""

import copy
import dataclasses
import functools
import inspect
import logging
import math
import re
import types
import typing
from contextlib import suppress
from typing import Any, Literal

import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import (
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from titan_mega_moe.config.source import Key, KeyProblem, Table, nearest

# Where torchtitan declares a base class, `type` names the class to take; these a TOML can spell out.
CHOICES: dict[type, tuple[type, ...]] = {
    BaseDataLoader.Config: (HuggingFaceTextDataLoader.Config, InterleavedHuggingFaceTextDataLoader.Config),
    BaseTokenizer.Config: (HuggingFaceTokenizer.Config,),
    BaseLoss.Config: (ChunkedLossWrapper.Config, CrossEntropyLoss.Config),
    BaseCheckpointManager.Config: (CheckpointManager.Config,),
}
MISSING = dataclasses.MISSING
_adamw = default_adamw().param_groups[0]
# [optimizer] name, lr, ... : one group for all parameters, as torchtitan's own default_adamw makes it.
SHORTHAND: dict[str, Any] = {"name": Literal["AdamW", "Adam"]} | {
    name: tuple[float, float] if isinstance(value, tuple) else type(value)
    for name, value in _adamw.optimizer_kwargs.items()
}


def structure(hint: Any, value: Any, key: Key, default: Any = MISSING) -> Any:
    """`value`, as TOML gives it, as an instance of `hint`; a table is laid over `default`.

    Raises:
        KeyProblem: unknown or missing key, wrong type, or a dataclass that refuses its values.
    """
    hint = bare(hint)
    if hint is Any:
        return value
    if is_union(hint):
        return _structure_union(hint, value, key, default)
    if dataclasses.is_dataclass(hint):
        return _structure_dataclass(typing.cast(type, hint), value, key, default)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in args or isinstance(value, bool):
            near = nearest(str(value), [str(a) for a in args])
            raise KeyProblem(key, f"expected {describe(hint)}, got {value!r}{near}")
        return value
    if origin is list and isinstance(value, list):
        return [structure(args[0], item, (*key, i)) for i, item in enumerate(value)]
    if origin is tuple and isinstance(value, list | tuple):
        arms = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(arms) == len(value):
            return tuple(structure(a, item, (*key, i)) for i, (a, item) in enumerate(zip(arms, value, strict=True)))
    if origin is dict and isinstance(value, dict):
        return {name: structure(args[1], item, (*key, name)) for name, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise KeyProblem(key, "expected a number, got nan")
        return float(value)
    # bool is an int to Python and never one to a person.
    if isinstance(hint, type) and origin is None and type(value) is hint:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise KeyProblem(key, f"expected an integer of at most 64 bits, got {value}")
        if isinstance(value, str) and "\0" in value:
            raise KeyProblem(key, f"expected a string without NUL characters, got {value!r}")
        return value
    raise KeyProblem(key, f"expected {describe(hint)}, got {value!r}")


def unstructure(value: Any, hint: Any = Any, default: Any = MISSING) -> Any:
    """The inverse of `structure`: tables, lists and plain values; a None that is the default is left out."""
    if value is None:
        return "none"
    if isinstance(value, list | tuple):
        item = (typing.get_args(bare(hint)) or (Any,))[0]
        return [unstructure(v, item) for v in value]
    if isinstance(value, dict):
        return {name: unstructure(v) for name, v in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    table: Table = {}
    cls: Any = type(value)
    for name, (sub, own) in fields_of(cls).items():
        held = getattr(value, name)
        start = getattr(default, name) if type(default) is type(value) else own
        modes = subcommands(sub)
        if modes:
            table[name] = {"mode": next(m for m, arm in modes.items() if arm is type(held))}
            table[name] |= {} if held is None else unstructure(held)
        elif held is not None or start is not None:
            table[name] = unstructure(held, sub, start)
            if choices_of(sub) and type(held) is not type(start):
                table[name]["type"] = owner(type(held))
    return table


@functools.cache
def fields_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """{key: (type hint, default or MISSING)} of dataclass `cls`, without what only Python can set.

    The defaults are shared between calls: copy before changing one.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {}
    logging.disable(logging.WARNING)  # what a default says of itself when it is made is said of no configuration
    for field in dataclasses.fields(cls):
        if field.init and tyro.conf.Suppress not in getattr(hints[field.name], "__metadata__", ()):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            found[field.name] = (hints[field.name], default)
    logging.disable(logging.NOTSET)
    return found


def leaf(cls: type, key: tuple[str, ...]) -> Any:
    """The type hint at dotted `key` below `cls`, or None where there is no such key."""
    name, *rest = key
    known = keys_of(cls)
    if name not in known:
        return None
    hint, default = known[name]
    if not rest:
        return hint
    candidates = [arm for arm in subcommands(hint).values() if arm is not type(None)]
    candidates += [*choices_of(hint), *([type(default)] if default is not MISSING else [])]
    candidates += [bare(hint)]
    if rest == ["mode"] and subcommands(hint):
        return Literal[tuple(subcommands(hint))]
    if rest == ["type"] and choices_of(hint):
        return str
    found = (leaf(c, tuple(rest)) for c in candidates if dataclasses.is_dataclass(c))
    return next((f for f in found if f is not None), None)


def keys_of(cls: type) -> dict[str, tuple[Any, Any]]:
    """`fields_of`, and the shorthand where there is one."""
    extra = {n: (h, MISSING) for n, h in SHORTHAND.items()} if cls is OptimizersContainer.Config else {}
    return fields_of(cls) | extra


def subcommands(hint: Any) -> dict[str, type]:
    """{name: class} of a union whose arms torchtitan made subcommands (activation_checkpoint), else {}."""
    if not is_union(hint):
        return {}
    names = {}
    for arm in typing.get_args(hint):
        for mark in getattr(arm, "__metadata__", ()):
            if getattr(mark, "name", None):
                names[mark.name] = bare(arm)
    return names


def choices_of(hint: Any) -> tuple[type, ...]:
    """The classes `type` may name where `hint` is a base class of torchtitan's; ours need not be listed."""
    base = bare(hint)
    if not isinstance(base, type) or base not in CHOICES:
        return ()
    ours = [c for c in _subclasses(base) if c.__module__.startswith("titan_mega_moe.")]
    return (*CHOICES[base], *ours)


def owner(config_cls: type) -> str:
    """HuggingFaceTokenizer.Config -> "HuggingFaceTokenizer"."""
    return config_cls.__qualname__.removesuffix(".Config")


def describe(hint: Any) -> str:
    """`hint` in words, for an error."""
    hint = bare(hint)
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if is_union(hint):
        return " or ".join("'none'" if bare(a) is type(None) else describe(a) for a in args)
    if typing.get_origin(hint) is list:
        return f"a list ({describe(args[0])} each)"
    if typing.get_origin(hint) is tuple:
        return f"a list of {len(args)} ({', '.join(describe(a) for a in args)})"
    if typing.get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return "a table"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a string", Any: "anything"}
    return names.get(hint, str(hint))


def _structure_union(hint: Any, value: Any, key: Key, default: Any) -> Any:
    modes = subcommands(hint)
    if modes:
        if not isinstance(value, dict):
            raise KeyProblem(key, f"expected a table with mode = {' | '.join(map(repr, modes))}, got {value!r}")
        table = dict(value)
        held = next((m for m, arm in modes.items() if type(default) is arm), next(iter(modes)))
        mode = table.pop("mode", held)
        mode = mode.replace("_", "-") if isinstance(mode, str) else mode
        structure(Literal[tuple(modes)], mode, (*key, "mode"))
        if modes[mode] is type(None):
            if table:
                raise KeyProblem((*key, next(iter(table))), "has no effect with mode = 'none': take it out")
            return None
        for name in table:
            having = [m for m, arm in modes.items() if arm is not type(None) and name in fields_of(arm)]
            if having and mode not in having:
                raise KeyProblem((*key, name), f"is a key of mode = {having[0]!r} only")
        return _structure_dataclass(modes[mode], table, key, default if mode == held else MISSING)
    arms = [bare(a) for a in typing.get_args(hint)]
    if type(None) in arms and isinstance(value, str) and value.lower() == "none":
        return None
    arms = [a for a in arms if a is not type(None)]
    for arm in sorted(arms, key=lambda a: a is not type(value)):
        try:
            return structure(arm, value, key)
        except KeyProblem as problem:
            if len(problem.key) > len(key):
                raise  # the right arm, and one of its items is wrong
    raise KeyProblem(key, f"expected {describe(hint)}, got {value!r}")


def _structure_dataclass(cls: type, value: Any, key: Key, default: Any) -> Any:
    if not isinstance(value, dict):
        raise KeyProblem(key, f"expected a table, got {value!r}")
    table = dict(value)
    base, choices = cls, choices_of(cls)
    if isinstance(default, cls):
        cls = type(default)
    if "type" in table and choices:
        names = {owner(c): c for c in choices}
        name = table.pop("type")
        structure(Literal[tuple(names)], name, (*key, "type"))
        cls = names[name]
    known = keys_of(cls)
    for name in table:
        if name not in known:
            raise KeyProblem((*key, name), _unknown(name, table[name], key, known, base, choices))
    if cls is OptimizersContainer.Config:
        table = expand_shorthand(table, key)
        known = fields_of(cls)
    start = copy.deepcopy(default) if type(default) is cls else None
    given = {
        name: structure(known[name][0], item, (*key, name), getattr(start, name) if start else known[name][1])
        for name, item in table.items()
    }
    absent = [n for n, (_, d) in known.items() if d is MISSING and n not in given and start is None]
    if absent:
        raise KeyProblem((*key, absent[0], *_required(known[absent[0]][0])[:1]), "is missing and has no default")
    try:
        return _make(cls, start, given)
    except (ValueError, AssertionError, TypeError) as error:
        raise KeyProblem((*key, *_culprit(cls, start, given, str(error))), sentence(error)) from None


def _required(hint: Any) -> list[str]:
    if not dataclasses.is_dataclass(hint):
        return []
    cls: Any = hint
    return [name for name, (_, default) in fields_of(cls).items() if default is MISSING]


def _make(cls: Any, start: Any, given: Table) -> Any:
    return cls(**given) if start is None else dataclasses.replace(start, **given)


def _culprit(cls: type, start: Any, given: Table, text: str) -> Key:
    """The key that `cls` refuses: one that its message names, else one without which it does not refuse."""
    if named := blame(cls, text):
        return named
    for name in given:
        with suppress(ValueError, AssertionError, TypeError):
            _make(cls, start, {n: v for n, v in given.items() if n != name})
            return (name,)
    return ()


def expand_shorthand(table: Table, key: Key) -> Table:
    """[optimizer] name, lr, betas, eps, weight_decay as one entry of param_groups for every parameter."""
    short = {n: structure(SHORTHAND[n], v, (*key, n)) for n, v in table.items() if n in SHORTHAND}
    rest = {n: v for n, v in table.items() if n not in SHORTHAND}
    if short and "param_groups" in rest:
        name = next(iter(short))
        raise KeyProblem((*key, name), "stands beside param_groups, which replaces it: move it into the groups")
    if "param_groups" not in rest:
        group = default_adamw(**{n: v for n, v in short.items() if n != "name"}).param_groups[0]
        rest["param_groups"] = [dataclasses.asdict(group) | {"optimizer_name": short.get("name", "AdamW")}]
    if isinstance(rest["param_groups"], list):
        rest["param_groups"] = [_tuple_betas(g) for g in rest["param_groups"]]
    return rest


def _tuple_betas(group: Any) -> Any:
    # TOML has no tuples; torchtitan's own groups hold one here, and it is saved in checkpoints.
    kwargs = group.get("optimizer_kwargs") if isinstance(group, dict) else None
    if isinstance(kwargs, dict) and isinstance(kwargs.get("betas"), list):
        return group | {"optimizer_kwargs": kwargs | {"betas": tuple(kwargs["betas"])}}
    return group


def check_group(group: ParamGroupConfig, key: Key) -> None:
    """Raise KeyProblem for an unknown optimizer, an argument it does not take or a bad pattern."""
    try:
        factory = OptimizersContainer._resolve_optimizer_factory(group.optimizer_name)
    except NotImplementedError:
        raise KeyProblem(
            (*key, "optimizer_name"),
            f"torchtitan has no optimizer {group.optimizer_name!r}; use 'AdamW' or 'Adam'",
        ) from None
    try:
        re.compile(group.pattern)
    except re.error as error:
        raise KeyProblem((*key, "pattern"), f"{group.pattern!r} is no regular expression: {error}") from None
    accepted = inspect.signature(factory).parameters
    for name in group.optimizer_kwargs:
        if name not in accepted and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
            near = nearest(name, list(accepted))
            raise KeyProblem((*key, "optimizer_kwargs", name), f"{group.optimizer_name} has no such argument{near}")


def _unknown(name: str, value: Any, key: Key, known: Table, base: type, choices: tuple[type, ...]) -> str:
    what = "section" if not key and isinstance(value, dict) else "key"
    elsewhere = [c for c in choices if name in fields_of(c)]
    if elsewhere:
        return f"is a key of type = {owner(elsewhere[0])!r} only"
    names = [*known, *(["type"] if choices else [])]
    return f"unknown {what}{nearest(name, names) or '; known: ' + (', '.join(names) or 'none')}"


def blame(cls: type, text: str) -> Key:
    """The key below `cls` that a refusal is about: its first dotted name, else its longest name, or none."""
    for name in re.findall(r"\w+\.\w+", text):
        if leaf(cls, tuple(name.split("."))) is not None:
            return tuple(name.split("."))
    return tuple(sorted((n for n in keys_of(cls) if n in text), key=len)[-1:])


def sentence(error: Exception) -> str:
    return " ".join(str(error).split())


def bare(hint: Any) -> Any:
    while hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    return hint


def is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _subclasses(cls: type) -> list[type]:
    found: list[type] = []
    children: list[type] = cls.__subclasses__()
    for child in children:
        found += [child, *_subclasses(child)]
    return found
