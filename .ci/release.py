"""The text half of a release: versions, changelogs, tags and what a distribution must hold.

Run by nox (``release`` and ``tagged``); needs only Python.
"""

import datetime
import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kv-core", "kv-kernels", "kv-rollout")
VERSION = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")


def prepare(package: str, version: str) -> None:
    """Write the version, and put the changelog's Unreleased section under a dated heading."""
    folder = folder_of(package)
    if not VERSION.fullmatch(version):
        raise SystemExit(f"a version looks like 0.2.0 or 0.2.0rc1, got {version}")
    changelog, project = folder / "CHANGELOG.md", folder / "pyproject.toml"
    text = changelog.read_text(encoding="utf-8")
    if section(text, version) is not None:
        raise SystemExit(f"{changelog} already has a section for {version}")
    news = section(text, "Unreleased")
    if not news:
        raise SystemExit(f"{changelog} has nothing under '## Unreleased': nothing to release")
    today = datetime.date.today().isoformat()
    dated = text.replace("## Unreleased", f"## Unreleased\n\n## {version} ({today})", 1)
    old = project.read_text(encoding="utf-8")
    new, count = re.subn(r'(?m)^version = ".*"$', f'version = "{version}"', old, count=1)
    if count != 1:
        raise SystemExit(f"{project} has no line 'version = \"...\"'")
    changelog.write_text(dated, encoding="utf-8")
    project.write_text(new, encoding="utf-8")
    print(f"{package} is {version} in {project} and {changelog}")


def check(tag: str) -> None:
    """Refuse a tag that disagrees with the files; write the release notes to build/release."""
    package, _, version = tag.rpartition("-v")
    folder = folder_of(package)
    declared = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    if declared["project"]["version"] != version:
        raise SystemExit(f"{tag}: pyproject.toml says {declared['project']['version']}")
    notes = section((folder / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    if not notes:
        raise SystemExit(f"{tag}: CHANGELOG.md has no section '## {version} (date)'")
    out = ROOT / "build" / "release"
    out.mkdir(parents=True, exist_ok=True)
    (out / "notes.md").write_text(notes + "\n", encoding="utf-8")
    print(f"{tag} agrees with pyproject.toml and CHANGELOG.md")


def contents(*distributions: str) -> None:
    """Refuse a wheel or an sdist that lacks its licence, its type marker or its metadata."""
    for name in distributions:
        if name.endswith(".whl"):
            with zipfile.ZipFile(name) as wheel:
                files = wheel.namelist()
        else:
            with tarfile.open(name) as sdist:
                files = sdist.getnames()
        wanted = ["LICENSE", "py.typed", "METADATA" if name.endswith(".whl") else "CHANGELOG.md"]
        missing = [want for want in wanted if not any(f.endswith("/" + want) for f in files)]
        if missing:
            raise SystemExit(f"{name} lacks {', '.join(missing)}")
        print(f"{Path(name).name}: {len(files)} files")


def section(changelog: str, heading: str) -> str | None:
    """What stands under one second-level heading, or None where there is no such heading."""
    pattern = rf"(?ms)^## {re.escape(heading)}(?: \(.*?\))?[ \t]*$(.*?)(?=^## |\Z)"
    found = re.search(pattern, changelog)
    return found and found[1].strip()


def folder_of(package: str) -> Path:
    """A package's folder."""
    if package not in PACKAGES:
        raise SystemExit(f"the packages are {', '.join(PACKAGES)}; got {package!r}")
    return ROOT / "packages" / package


if __name__ == "__main__":
    {"prepare": prepare, "check": check, "contents": contents}[sys.argv[1]](*sys.argv[2:])
