"""Real text with no download: the source files of the running Python's standard library, and a tokenizer.

Importing this module adds two datasets to TorchTitan's table, which `[dataloader] dataset` names:

- "stdlib": about 95% of the files, "stdlib_validation": the rest. A file's name alone decides its part and
  its place, so both are the same on every rank and in every run of one Python installation.
- `dataset_path` reads the `.py` files of another folder instead.

`[tokenizer] type = "StdlibTokenizer"` is a byte-level BPE trained on the first of the two when it is first
built, and kept in the user's cache folder. Hugging Face datasets and tokenizers are TorchTitan's own affair
and work as they do there: by name, by `dataset_path`, by `hf_assets_path`.
"""

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tokenizers
from datasets import Dataset
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.tools.logging import logger

# Installed packages are not the library, and some distributions leave the library's own tests out.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_HELD_OUT = 20  # one file in this many
_PIECE = 1000  # characters, about 280 tokens
_BOS, _EOS = "<|bos|>", "<|eos|>"


def source_files(folder: str | Path, *, held_out: bool) -> list[Path]:
    """The Python files of one part of `folder`, by name."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        files += [Path(parent, name) for name in names if name.endswith(".py")]
    part = (path for path in files if _is_held_out(path.relative_to(folder).as_posix()) == held_out)
    return sorted(part)


def _is_held_out(name: str) -> bool:
    return _digest(name)[0] % _HELD_OUT == 0


def load_sources(folder: str, *, held_out: bool) -> Dataset:
    """One row a piece of a file, in training order: `name`, as "json/decoder.py:0", and `text`.

    The pieces of a file, cut at line ends, make up all of it. Their order is that of their names' digests:
    in order of files, the few steps that one long file lasts would see nothing else, and each data-parallel
    rank, which reads a contiguous part of the rows, its own few packages.

    Raises:
        FileNotFoundError: the folder has no Python source in that part (a zipped or stripped library).
    """
    pieces = {}
    for path in source_files(folder, held_out=held_out):
        name = path.relative_to(folder).as_posix()
        for i, text in enumerate(_pieces(path.read_text("utf-8", "replace"))):
            pieces[f"{name}:{i}"] = text
    if not pieces:
        raise FileNotFoundError(_no_source(folder, held_out))
    names = sorted(pieces, key=_digest)
    return Dataset.from_dict({"name": names, "text": [pieces[name] for name in names]})


def _no_source(folder: str, held_out: bool) -> str:
    which = "held-out " if held_out else ""
    return f"no {which}Python source in {folder}: give dataset_path a folder with some"


def missing_reason(dataset: str, dataset_path: str | None) -> str | None:
    """Why a dataset of TorchTitan's table cannot be read, as far as this machine alone can tell; else None."""
    path = dataset_path or DATASETS[dataset].path
    if dataset in _PARTS:
        held_out = _PARTS[dataset]
        return None if source_files(path, held_out=held_out) else _no_source(path, held_out)
    # A dataset's name on the Hub has one slash at most and no path's beginning.
    if not os.path.exists(path) and (path.count("/") > 1 or path.startswith(("/", "."))):
        return f"{path!r} is not there: give dataset_path a folder, a file or the name of a dataset"
    return None


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE - 1) + 1 or len(text)
        yield text[start:end]
        start = end


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _text(row: dict[str, str]) -> str:
    return row["text"]


_PARTS = {"stdlib": False, "stdlib_validation": True}  # name -> is it the held-out part
for _name, _held_out in _PARTS.items():
    DATASETS[_name] = DatasetConfig(
        path=sysconfig.get_path("stdlib"),
        loader=partial(load_sources, held_out=_held_out),
        sample_processor=_text,
    )


class StdlibTokenizer(HuggingFaceTokenizer):
    """Byte-level BPE trained on the "stdlib" dataset; any text round-trips.

    TorchTitan passes `hf_assets_path` when it builds a tokenizer; this one has no use for it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        vocab_size: int = 2048
        """Tokens in all: 256 bytes, 2 marks for the ends of a document, the rest merges"""

        def __post_init__(self) -> None:
            if self.vocab_size < 258:
                raise ValueError(f"tokenizer.vocab_size is {self.vocab_size}: 258 is the least, for bytes and marks")

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        super().__init__(config, tokenizer_path=str(trained_tokenizer(config.vocab_size)))


def trained_tokenizer(vocab_size: int) -> Path:
    """The folder of the tokenizer's files, trained now if this corpus and vocabulary size have none yet.

    Ranks that come here together each train one; the first to finish puts its folder in place for all.
    """
    texts = load_sources(sysconfig.get_path("stdlib"), held_out=False)["text"]
    key = hashlib.sha256(f"{tokenizers.__version__} {vocab_size}".encode())
    for text in texts:
        key.update(text.encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titan_mega_moe"
    folder = cache / f"stdlib-bpe-{vocab_size}-{key.hexdigest()[:16]}"
    if not folder.exists():
        logger.info(f"Training a tokenizer of {vocab_size} tokens on the standard library, kept in {folder}")
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        _train(texts, vocab_size, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            # Renaming onto a folder that is not empty fails: another rank was first.
            if not folder.exists():
                raise
            shutil.rmtree(unfinished)
    return folder


def _train(texts: list[str], vocab_size: int, folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[_BOS, _EOS],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": _BOS, "eos_token": _EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
