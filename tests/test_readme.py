"""README.md keeps up with the package: its commands, keys, backends and tree are those there are."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from titan_mega_moe import cli
from titan_mega_moe.op import backends
from titan_mega_moe.routed_experts import MegaMoEOptions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_is_shown(command):
    assert f"titan-mega-moe {command} " in README


@pytest.mark.parametrize("key", [field.name for field in fields(MegaMoEOptions)])
def test_every_key_of_the_layer_is_explained(key):
    assert re.search(rf"^\| `{key}` \||`\[mega_moe\] {key}` ", README, re.MULTILINE)


@pytest.mark.parametrize("name", [*backends.NAMES, *backends.UPSTREAM])
def test_every_backend_is_explained(name):
    assert re.search(rf"^\| [^|]*`{name}`[^|]* \|", README, re.MULTILINE)


def test_every_file_that_is_named_exists():
    linked = re.findall(r"\]\(([^):]+)\)", README)
    named = re.findall(r"\b(?:train_configs|scripts|docs)/[\w./]+\w", README)
    assert linked and named
    assert [path for path in [*linked, *named] if not (ROOT / path).exists()] == []


def test_the_tree_has_every_module():
    tree = README.partition("## The tree")[2].partition("\n## ")[0]
    package = ROOT / "titan_mega_moe"
    modules = {path.name for folder in (package, package / "op") for path in folder.glob("*.py")}
    assert sorted(modules - set(re.findall(r"\w+\.py", tree)) - {"version.py"}) == []
