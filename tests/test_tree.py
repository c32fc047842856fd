"""What must not be in the repository, and what each package must have."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["kv-core", "kv-kernels", "kv-rollout"]
LARGEST = 9_000_000  # bytes; weights and clips live in git only while they are small
# In pieces, so that this file does not hold what it looks for.
HOSTS = ("files.python" + "hosted.org", "pypi" + ".org/", "download.py" + "torch.org")
SETTINGS = ("index-" + "url", "/sim" + "ple/", 'registry = "' + "http")
PLACES = ("/ho" + "me/", "/Us" + "ers/", "/ro" + "ot/", "/op" + "t/", "C:" + "\\")


def in_git() -> list[Path]:
    """Files that git tracks or would track."""
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout, so there is no telling what is tracked")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def lines_with(words: tuple[str, ...]) -> list[str]:
    """Lines of tracked text files that hold one of these words."""
    found = []
    for file in in_git():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if any(word in line for word in words):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def test_no_file_names_a_package_registry() -> None:
    assert lines_with(HOSTS + SETTINGS) == []


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    assert lines_with((*PLACES, f"{ROOT}/")) == []


def test_no_lock_file_is_tracked() -> None:
    assert [file for file in in_git() if file.name in ("uv.lock", "pylock.toml")] == []


def test_no_tracked_file_is_large() -> None:
    large = [(str(file), file.stat().st_size) for file in in_git()]
    assert [(file, size) for file, size in large if size > LARGEST] == []


def test_actions_are_pinned_by_commit_with_their_version() -> None:
    for workflow in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for used in re.findall(r"uses: (.+)", workflow.read_text(encoding="utf-8")):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used), workflow.name


def test_the_index_of_decisions_lists_each_under_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\| (\d+) \| \[(.+)\]\((.+\.md)\) \|", (folder / "index.md").read_text())
    found = [
        (str(int(page.name[:4])), page.read_text().splitlines()[0].split(". ", 1)[1], page.name)
        for page in sorted(folder.glob("0*.md"))
    ]
    assert listed == found


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_stands_alone(name: str) -> None:
    folder, module = ROOT / "packages" / name, name.replace("-", "_")
    for file in ("README.md", "CHANGELOG.md", "tests", f"src/{module}/py.typed"):
        assert (folder / file).exists(), file
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", PACKAGES)
def test_sibling_bounds_admit_this_checkout(name: str) -> None:
    """A bound is ``>=A.B,<A.B+1`` while below 1.0, where a minor version may break."""
    projects = {
        each: tomllib.loads((ROOT / "packages" / each / "pyproject.toml").read_text())["project"]
        for each in PACKAGES
    }
    for need in projects[name]["dependencies"]:
        if found := re.fullmatch(r"(kv-\w+)>=0\.(\d+)(?:\.(\d+))?,<0\.(\d+)", need):
            sibling, minor, patch, below = found[1], int(found[2]), int(found[3] or 0), found[4]
            assert int(below) == minor + 1, need
            version = projects[sibling]["version"].split(".")
            assert version[:2] == ["0", str(minor)], need
            assert int(re.match(r"\d+", version[2])[0]) >= patch, need  # type: ignore[index]
        else:
            assert not need.startswith("kv-"), f"{need} has no bounds of the form above"
