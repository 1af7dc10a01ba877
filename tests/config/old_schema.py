"""Regenerates torchtitan_0_2_schema.json: every section.key of torchtitan 0.1.0 to 0.2.2's TOML files.

    python tests/config/old_schema.py

downloads each wheel with pip, reads the dataclasses out of its config module without importing it, and writes
[type, default] for each key of each version (default null where it is computed, as for an empty list).
Nothing else of the wheels is kept.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("0.1.0", "0.2.0", "0.2.1", "0.2.2")
SCHEMA = Path(__file__).with_name("torchtitan_0_2_schema.json")


def config_source(version: str, folder: str) -> str:
    """The text of the module that holds torchtitan `version`'s JobConfig."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder]
    subprocess.run([*pip, f"torchtitan=={version}"], check=True)
    with zipfile.ZipFile(next(Path(folder).glob(f"torchtitan-{version}-*.whl"))) as wheel:
        names = set(wheel.namelist())
        name = next(n for n in ("torchtitan/config/job_config.py", "torchtitan/config_manager.py") if n in names)
        return wheel.read(name).decode()


def schema(source: str) -> dict[str, object]:
    """{"section.key": [type, default]} of the JobConfig in `source`; nested ones give section.part.key."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}

    def walk(class_name: str, prefix: str) -> dict[str, object]:
        found: dict[str, object] = {}
        for node in classes[class_name].body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            name = f"{prefix}{node.target.id}"
            if isinstance(node.annotation, ast.Name) and node.annotation.id in classes:
                found |= walk(node.annotation.id, f"{name}.")
            else:
                try:
                    default = ast.literal_eval(node.value) if node.value else None
                except ValueError:
                    default = None
                found[name] = [ast.unparse(node.annotation), default]
        return found

    return walk("JobConfig", "")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tables = {version: schema(config_source(version, folder)) for version in VERSIONS}
    SCHEMA.write_text(json.dumps(tables, indent=1) + "\n")
