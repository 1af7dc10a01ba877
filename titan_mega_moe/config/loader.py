"""The steps of `load`: read, lay the command line over it, make the dataclasses, check, add the model."""

import dataclasses
import io
import logging
import typing
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import tomli
import tomli_w
import tyro
from torchtitan.config.manager import ConfigManager, custom_registry
from torchtitan.config.override import OverrideImport
from torchtitan.models.common import config_utils

# Importing the module puts its datasets and tokenizer within reach of a TOML.
import titan_mega_moe.data  # noqa: F401
from titan_mega_moe import device, models
from titan_mega_moe.config import legacy, schema, values
from titan_mega_moe.config.run_config import RunConfig
from titan_mega_moe.config.source import ConfigError, KeyProblem, Table, read, spell, split_overrides

ConfigManager.register_tyro_rules(custom_registry)
logger = logging.getLogger("titan_mega_moe.config")  # its level is not that of the rest of the package
logger.setLevel(logging.WARNING)
# torchtitan warns of its own default, true, in every run that loads no other's checkpoint.
_NEEDLESS = "initial_load_model_only=True has no effect"
logging.getLogger().addFilter(lambda record: not str(record.msg).startswith(_NEEDLESS))


def load(path: str | Path, args: list[str]) -> RunConfig:
    table = read(path)
    overrides = split_overrides(args)
    with _named(path, set(overrides)):
        table, notes = legacy.convert(table)
        for note in notes:
            logger.warning(f"{path}: {note}")
        for key, words in overrides.items():
            _lay(table, *_override(key, words))
        config: RunConfig = schema.structure(RunConfig, table, ())
        values.check(config)
        return _with_model(config)


def check_world(config: RunConfig, world_size: int, path: str | Path) -> None:
    with _named(path, set()):
        values.check_world(config, world_size)


def to_toml(config: RunConfig) -> str:
    return tomli_w.dumps(schema.unstructure(config))


def _with_model(config: RunConfig) -> RunConfig:
    model = config.model
    if (reason := models.refusal_reason(model.name, model.flavor)) is not None:
        known = model.name in models.families() or "is not known" not in reason
        raise KeyProblem(("model", "flavor" if known else "name"), reason)
    try:
        spec = models.model_spec(
            model.name,
            model.flavor,
            attn_backend=model.attn_backend,
            layers=model.layers,
            options=config.mega_moe,
        )
    except (ValueError, KeyError, TypeError, NotImplementedError) as error:
        raise KeyProblem(("model", "layers" if "layers" in str(error) else "attn_backend"), str(error)) from None
    known = config_utils.decoder_vocab_size(spec)
    for node in _losses(config.loss):
        if getattr(node, "global_vocab_size", known) not in (None, known):
            text = f"expected the model's {known}, got {node.global_vocab_size}: leave it out"
            raise KeyProblem(("loss", *(["loss_fn"] if node is not config.loss else []), "global_vocab_size"), text)
        if getattr(node, "global_vocab_size", known) is None:
            node.global_vocab_size = known
    try:
        config = dataclasses.replace(config, **{"model_spec": spec})
    except ValueError as error:
        raise KeyProblem(schema.blame(RunConfig, str(error)), schema.sentence(error)) from None
    prepared = config.device.kind == device.prepared()
    if prepared and (reason := device.refusal_reason(config)) is not None:
        raise KeyProblem(schema.blame(RunConfig, reason), reason)
    return config


def _losses(loss: Any) -> list[Any]:
    inner = getattr(loss, "loss_fn", None)
    return [loss, *_losses(inner)] if inner is not None else [loss]


@contextmanager
def _named(path: str | Path, overridden: set[tuple[str, ...]]) -> Iterator[None]:
    """Turn a KeyProblem into a ConfigError that names the file and, if it gave the key, the command line."""
    try:
        yield
    except KeyProblem as problem:
        given = any(all(a == b for a, b in zip(problem.key, key, strict=False)) for key in overridden)
        origin = " (from the command line)" if given else ""
        where = f"{spell(problem.key)}{origin}: " if problem.key else ""
        raise ConfigError(f"{path}: {where}{problem.text}") from None


def _lay(table: Table, key: tuple[str, ...], value: Any) -> None:
    for i, name in enumerate(key[:-1]):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise KeyProblem(key[: i + 1], f"expected a table, got {table!r}")
    table[key[-1]] = value


def _override(key: tuple[str, ...], words: list[str]) -> tuple[tuple[str, ...], Any]:
    """The key and value an override spells: torchtitan's own rules for plain types, TOML for the rest."""
    hint = schema.leaf(RunConfig, key)
    positive = (*key[:-1], key[-1].removeprefix("no_"))
    if hint is None and not words and schema.leaf(RunConfig, positive) is bool:
        return positive, False
    if hint is None:
        return key, words[0] if words else True  # structure() says what is wrong with it, as it would of the file's
    word = " ".join(words)
    if hint is bool:
        return key, {"": True, "true": True, "false": False}.get(word.lower(), word)
    if not words:
        raise KeyProblem(key, f"needs a value: {schema.describe(hint)}")
    if word.lower() == "none":
        return key, word
    try:
        if _is_plain(hint):
            return key, _parse_plain(hint, words)
        return key, tomli.loads(f"value = {word}")["value"]
    except (SystemExit, ValueError):
        syntax = "" if _is_plain(hint) else " in TOML syntax"
        raise KeyProblem(key, f"expected {schema.describe(hint)}{syntax}, got {word!r}") from None


def _is_plain(hint: Any) -> bool:
    if hint in (list[str], list[OverrideImport]) or hint in (int, float, str, type(None)):
        return True
    if typing.get_origin(hint) is typing.Literal:
        return True
    return schema.is_union(hint) and all(_is_plain(arm) for arm in typing.get_args(hint))


def _parse_plain(hint: Any, words: list[str]) -> Any:
    # As a flag, as torchtitan has it: its rule for override.imports needs that and a default.
    default: dict[str, Any] = {"default_factory": list} if typing.get_origin(hint) is list else {}
    flag = dataclasses.make_dataclass("Flag", [("value", hint, dataclasses.field(**default))])
    with redirect_stderr(io.StringIO()):
        return tyro.cli(flag, args=["--value", *words], registry=custom_registry).value
