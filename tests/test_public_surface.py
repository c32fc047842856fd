"""What the three packages promise: checked-in lists of names, docstrings, versions, wheels.

After a wanted change of a public name or signature, write the lists anew and commit them:
``.venv/bin/python tests/test_public_surface.py`` (``./dev demo`` makes ``.venv``;
``.tools/bin/uv pip install --python .venv/bin/python pytest`` puts pytest there).
"""

import enum
import importlib
import importlib.metadata
import inspect
import json
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SURFACE = ROOT / "tests" / "surface"
PACKAGES = ("kv_core", "kv_kernels", "kv_rollout")


def surface(package: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every public name of a package with what it is, and the public members of its classes."""
    for name in sorted(package.__all__):
        value = inspect.unwrap(getattr(package, name))
        yield f"{name}{parameters(value)}", value
        if inspect.isclass(value):
            for member, what in sorted(members(value).items()):
                yield f"{name}.{member}{parameters(what)}", what


def members(cls: type) -> dict[str, Any]:
    """Public methods, properties and enum members that our own classes define."""
    if issubclass(cls, enum.Enum):
        return {member.name: member for member in cls}
    found: dict[str, Any] = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__.split(".")[0] in PACKAGES:
            found |= {
                name: value
                for name, value in vars(owner).items()
                if not name.startswith("_") and is_documentable(value)
            }
    return found


def is_documentable(value: Any) -> bool:
    """Whether a class member is code: fields and constants are not."""
    kinds = (property, classmethod, staticmethod)
    return inspect.isfunction(value) or isinstance(value, kinds) or hasattr(value, "func")


def parameters(value: Any) -> str:
    """A signature without annotations and default values, which differ between Pythons."""
    value = getattr(value, "__func__", value)
    if inspect.isclass(value):
        own = "__init__" in vars(value) or issubclass(value, tuple)
        foreign = issubclass(value, (enum.Enum, BaseException)) or getattr(value, "_is_protocol", 0)
        if foreign or not own:
            return ""
    elif not inspect.isfunction(value):
        return ""
    shown, starred = [], False
    for item in inspect.signature(value).parameters.values():
        if item.name in ("self", "cls") or item.name.startswith("_"):
            continue
        if item.kind is item.VAR_POSITIONAL:
            starred = True
        elif item.kind is item.KEYWORD_ONLY and not starred:
            shown.append("*")
            starred = True
        prefix = {item.VAR_POSITIONAL: "*", item.VAR_KEYWORD: "**"}.get(item.kind, "")
        default = "" if item.default is item.empty else "=…"
        shown.append(f"{prefix}{item.name}{default}")
    return f"({', '.join(shown)})"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_the_checked_in_ones(package: str) -> None:
    listed = (SURFACE / f"{package}.txt").read_text(encoding="utf-8").splitlines()
    found = [line for line, _ in surface(importlib.import_module(package))]
    assert found == listed, "if this is wanted: .venv/bin/python tests/test_public_surface.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_object_has_a_docstring(package: str) -> None:
    undocumented = [
        line
        for line, value in surface(importlib.import_module(package))
        if inspect.isclass(value) or inspect.isroutine(value) or is_documentable(value)
        if not written_docstring(value)
    ]
    assert undocumented == []


def written_docstring(value: Any) -> str | None:
    """An object's own docstring; the one that dataclass or NamedTuple makes up does not count."""
    doc = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    made_up = inspect.isclass(value) and doc and doc.startswith(f"{value.__name__}(")
    return None if made_up else doc


@pytest.mark.parametrize("package", PACKAGES)
def test_no_exported_name_hides_a_submodule(package: str) -> None:
    top = importlib.import_module(package)
    modules = [top] + [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(top.__path__, f"{package}.")
        if found.ispkg
    ]
    hidden = [
        f"{module.__name__}.{found.name}"
        for module in modules
        for found in pkgutil.iter_modules(module.__path__)
        if found.name in getattr(module, "__all__", ())
        or not isinstance(getattr(module, found.name, module), ModuleType)
    ]
    assert hidden == []


@pytest.mark.parametrize("package", PACKAGES)
def test_versions_agree(package: str) -> None:
    """The installed distribution, pyproject.toml and the changelog's newest section."""
    name = package.replace("_", "-")
    folder = ROOT / "packages" / name
    declared = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert importlib.metadata.version(name) == declared["version"]
    headings = re.findall(r"(?m)^## (.+)$", (folder / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert headings[0] == "Unreleased"
    for heading in headings[1:]:
        assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)? \(\d{4}-\d\d-\d\d\)", heading)
    for heading in headings[1:2]:
        assert heading.split()[0] == declared["version"]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_its_type_marker_and_licence(package: str) -> None:
    dist = importlib.metadata.distribution(package.replace("_", "-"))
    origin = json.loads(dist.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip(f"{dist.name} is installed editable, so there is no wheel to look into")
    files = {str(file).replace("\\", "/") for file in dist.files or ()}
    assert f"{package}/py.typed" in files
    assert any(file.endswith("dist-info/licenses/LICENSE") for file in files)
    foreign = {file.split("/")[0] for file in files if not file.startswith("../")}
    assert foreign == {package, f"{package}-{dist.version}.dist-info"}


if __name__ == "__main__":
    SURFACE.mkdir(exist_ok=True)
    for each in PACKAGES:
        lines = [line for line, _ in surface(importlib.import_module(each))]
        (SURFACE / f"{each}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{each}: {len(lines)} public names in {SURFACE / each}.txt")
