"""The arrow: core knows nothing of kernels, kernels nothing of rollout, and imports are light."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ABOVE = {
    "kv_core": {"kv_kernels", "kv_rollout"},
    "kv_kernels": {"kv_rollout"},
    "kv_rollout": set(),
}
# What only some calls need: a compiler, the command line, and readers and writers of pictures.
HEAVY = {"triton", "typer", "rich", "av", "PIL", "skimage", "sklearn", "matplotlib"}
REPORT = """
import json, sys
import {package}
cuda = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
print(json.dumps({{"loaded": sorted(sys.modules), "cuda": cuda}}))
"""


@pytest.fixture(scope="module", params=ABOVE)
def fresh(request: pytest.FixtureRequest) -> tuple[str, set[str], bool]:
    """A package imported in an interpreter of its own: name, top-level modules loaded, CUDA."""
    package = request.param
    command = [sys.executable, "-c", REPORT.format(package=package)]
    # A kernel that runs in the interpreter may need Triton early; users import without it.
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    return package, {module.split(".")[0] for module in report["loaded"]}, report["cuda"]


def test_a_package_loads_nothing_above_it(fresh: tuple[str, set[str], bool]) -> None:
    package, loaded, _ = fresh
    assert package in loaded
    assert loaded & ABOVE[package] == set()


def test_importing_a_package_loads_nothing_heavy(fresh: tuple[str, set[str], bool]) -> None:
    _, loaded, _ = fresh
    assert loaded & HEAVY == set()


def test_importing_a_package_leaves_cuda_alone(fresh: tuple[str, set[str], bool]) -> None:
    _, _, cuda = fresh
    assert not cuda


@pytest.mark.parametrize("package", ABOVE)
def test_no_source_file_names_a_package_above_it(package: str) -> None:
    """Also inside functions, under TYPE_CHECKING, and as "module:function" strings."""
    found = [
        f"{file.relative_to(folder)}:{line}: {module}"
        for folder in [source_of(package)]
        for file in sorted(folder.rglob("*.py"))
        for module, line in named_modules(file)
        if module.split(".")[0] in ABOVE[package]
    ]
    assert found == []


def test_the_static_check_sees_every_way_to_name_a_module(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        '"""Prose about kv_rollout is fine."""\n'
        "import kv_rollout.model as m\n"
        "def f():\n"
        "    from kv_rollout import run_rollout\n"
        "    importlib.import_module('kv_rollout.cli')\n"
        "TARGET = 'kv_rollout.cli:main'\n"
        "from . import sibling\n"
    )
    named = [(module, line) for module, line in named_modules(file) if "rollout" in module]
    assert sorted(named, key=lambda found: found[1]) == [
        ("kv_rollout.model", 2),
        ("kv_rollout", 4),
        ("kv_rollout.cli", 5),
        ("kv_rollout.cli", 6),
    ]


def source_of(package: str) -> Path:
    """Where a package is installed, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def named_modules(file: Path) -> Iterator[tuple[str, int]]:
    """Every module that a source file imports, or names in a string as something to load."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"kv_\w+(\.\w+)*(:\w+)?", node.value):
                yield node.value.partition(":")[0], node.lineno
