"""The text half of a release: what it writes, and what it refuses."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "release.py"
CHANGELOG = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.1.0 (2026-01-31)\n\n- Old.\n"


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, working on a copy of one package's two files."""
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    folder = tmp_path / "packages" / "kv-core"
    folder.mkdir(parents=True)
    (folder / "CHANGELOG.md").write_text(CHANGELOG)
    (folder / "pyproject.toml").write_text('[project]\nname = "kv-core"\nversion = "0.1.0"\n')
    return module


def test_prepare_dates_the_news_and_writes_the_version(release: ModuleType) -> None:
    release.prepare("kv-core", "0.2.0")
    folder = release.ROOT / "packages" / "kv-core"
    text = (folder / "CHANGELOG.md").read_text()
    assert re.sub(r"0\.2\.0 \(\d{4}-\d\d-\d\d\)", "0.2.0 (DATE)", text) == CHANGELOG.replace(
        "## Unreleased\n", "## Unreleased\n\n## 0.2.0 (DATE)\n"
    )
    assert 'version = "0.2.0"' in (folder / "pyproject.toml").read_text()
    release.check("kv-core-v0.2.0")
    assert (release.ROOT / "build" / "release" / "notes.md").read_text() == "- New.\n"


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        ("kv-cor", "0.2.0", "the packages are"),
        ("kv-core", "v0.2", "a version looks like"),
        ("kv-core", "0.1.0", "already has a section"),
    ],
)
def test_prepare_refuses_and_writes_nothing(
    release: ModuleType, package: str, version: str, said: str
) -> None:
    with pytest.raises(SystemExit, match=said):
        release.prepare(package, version)
    assert (release.ROOT / "packages" / "kv-core" / "CHANGELOG.md").read_text() == CHANGELOG


def test_prepare_refuses_a_release_without_news(release: ModuleType) -> None:
    release.prepare("kv-core", "0.2.0")
    with pytest.raises(SystemExit, match="nothing to release"):
        release.prepare("kv-core", "0.3.0")


def test_check_refuses_a_tag_that_disagrees(release: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"pyproject.toml says 0\.1\.0"):
        release.check("kv-core-v0.1.1")
