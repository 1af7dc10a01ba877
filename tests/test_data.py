"""The standard library as a corpus: its order, its parts, its tokenizer, and the way TorchTitan reads it."""

import json
import multiprocessing
import sysconfig
from pathlib import Path

import pytest
import tokenizers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader

from titan_mega_moe.data import StdlibTokenizer, load_sources, source_files, trained_tokenizer

STDLIB = sysconfig.get_path("stdlib")


@pytest.fixture(scope="module")
def tokenizer():
    return StdlibTokenizer.Config().build(tokenizer_path="not used")


def loader(tokenizer, dataset="stdlib", rank=0, ranks=1, **config):
    return HuggingFaceTextDataLoader.Config(dataset=dataset, **config).build(
        dp_world_size=ranks, dp_rank=rank, tokenizer=tokenizer, seq_len=64, local_batch_size=2
    )


def batches(loader, count):
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def test_every_source_file_is_in_exactly_one_part_and_none_that_was_installed():
    train, held_out = (set(source_files(STDLIB, held_out=part)) for part in (False, True))
    assert not train & held_out
    names = {path.relative_to(STDLIB).as_posix() for path in train | held_out}
    assert {"json/decoder.py", "ast.py", "asyncio/events.py"} <= names
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    assert 0.02 < len(held_out) / len(train | held_out) < 0.1


def test_the_part_of_a_file_does_not_depend_on_the_other_files(tmp_path):
    files = [f"m{i}.py" for i in range(60)]
    for name in files:
        (tmp_path / name).write_text(f"# {name}\n")
    held_out = source_files(tmp_path, held_out=True)
    for path in source_files(tmp_path, held_out=False)[::2]:
        path.unlink()
    assert source_files(tmp_path, held_out=True) == held_out


def test_pieces_make_up_the_files(tmp_path):
    text = "".join(f"line {i} = {'x' * (i % 90)}\r\n" for i in range(300)) + "last line without an end"
    (tmp_path / "module.py").write_text(text, newline="")
    (tmp_path / "empty.py").write_text("")
    rows = load_sources(str(tmp_path), held_out=False)
    pieces = dict(zip(rows["name"], rows["text"], strict=True))
    assert len(pieces) > 3
    whole = "".join(pieces[f"module.py:{i}"] for i in range(len(pieces)))
    assert whole == text.replace("\r\n", "\n")
    assert list(pieces) != sorted(pieces)  # pieces of all files are mixed


def test_order_is_the_same_in_every_load():
    first, second = (load_sources(STDLIB, held_out=False)["name"][:200] for _ in range(2))
    assert list(first) == list(second)


def test_a_folder_without_sources_is_refused(tmp_path):
    (tmp_path / "module.py").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no Python source in .*: give dataset_path a folder"):
        load_sources(str(tmp_path), held_out=False)
    with pytest.raises(FileNotFoundError, match="no held-out Python source in"):
        load_sources(str(tmp_path), held_out=True)


@pytest.mark.parametrize("text", ["def f(x):\n\treturn x  # ok\n", "naïve Ω 🙂 \x00\x7f", "", "  \r\n "])
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_fills_its_vocabulary_and_marks_documents(tokenizer):
    assert tokenizer.get_vocab_size() == 2048
    ids = tokenizer.encode("import os\n", add_bos=True, add_eos=True)
    assert ids[0] == tokenizer.bos_id and ids[-1] == tokenizer.eos_id
    assert max(ids) < 2048 and len(ids) < len("import os\n")


def test_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size is 200: 258 is the least"):
        StdlibTokenizer.Config(vocab_size=200)


def train_in(cache, go, results):
    import os

    os.environ["XDG_CACHE_HOME"] = cache
    go.wait()
    results.put(str(trained_tokenizer(300)))


def test_ranks_that_train_it_together_end_with_one_whole_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    go, results = context.Barrier(3), context.Queue()
    ranks = [context.Process(target=train_in, args=(str(tmp_path), go, results)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    folders = {results.get(timeout=120) for _ in ranks}
    for rank in ranks:
        rank.join(30)
    assert len(folders) == 1
    assert [str(path) for path in (tmp_path / "titan_mega_moe").iterdir()] == list(folders)
    assert tokenizers.Tokenizer.from_file(f"{folders.pop()}/tokenizer.json").get_vocab_size() == 300


def test_data_parallel_ranks_read_different_text_and_every_run_the_same(tokenizer):
    (first, _), *_ = batches(loader(tokenizer, rank=0, ranks=2), 1)
    (other, _), *_ = batches(loader(tokenizer, rank=1, ranks=2), 1)
    (again, _), *_ = batches(loader(tokenizer, rank=0, ranks=2), 1)
    assert not first["input"].equal(other["input"])
    assert first["input"].equal(again["input"])


def test_reading_resumes_where_a_checkpoint_left_it(tokenizer):
    whole = batches(loader(tokenizer), 6)
    source = loader(tokenizer, num_workers=0)
    iterator = iter(source)
    for _ in range(3):
        next(iterator)
    resumed = loader(tokenizer)
    resumed.load_state_dict(source.state_dict())
    for (inputs, labels), (expected, expected_labels) in zip(batches(resumed, 3), whole[3:], strict=True):
        assert inputs["input"].equal(expected["input"]) and labels.equal(expected_labels)


def test_validation_reads_the_held_out_part(tokenizer):
    (inputs, _), *_ = batches(loader(tokenizer, dataset="stdlib_validation"), 1)
    names = load_sources(STDLIB, held_out=True)["name"]
    assert {name.rsplit(":", 1)[0] for name in names} == {
        path.relative_to(STDLIB).as_posix() for path in source_files(STDLIB, held_out=True) if path.stat().st_size
    }
    first = tokenizer.decode(inputs["input"][0, 1:40].tolist())
    assert load_sources(STDLIB, held_out=True)["text"][0].startswith(first[:20])


def test_dataset_path_reads_another_folder(tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text("wombat = 1\n" * 400)
    (inputs, _), *_ = batches(loader(tokenizer, dataset_path=str(tmp_path)), 1)
    assert "wombat" in tokenizer.decode(inputs["input"][0].tolist())


def test_torchtitans_own_datasets_and_tokenizers_work_by_name_and_path(tmp_path):
    """A Hugging Face folder for each, as a user has them on disk."""
    assert "c4" in DATASETS
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": f"document {i} " * 60}) for i in range(20)]
    (tmp_path / "data" / "train.json").write_text("\n".join(rows))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((Path(trained_tokenizer(300)) / name).read_text())
    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(tmp_path))
    (inputs, _), *_ = batches(loader(tokenizer, "c4_test", dataset_path=str(tmp_path / "data")), 1)
    assert "document 0" in tokenizer.decode(inputs["input"][0].tolist())
