"""Every Python example of the README files and the docs runs, and every relative link arrives.

The fences of one file run in order, in one namespace, on the CPU, in a temporary folder. A fence
below ``<!-- not run: reason -->`` is not run, and the report of skips says why.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
        *ROOT.glob("packages/*/README.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
FENCE = re.compile(r"^( *)(`{3,}|~{3,})([^\n]*)\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z", re.DOTALL)
LINK = re.compile(r"""!?\[[^\]]*\]\(\s*<?([^)\s>]+)|\b(?:src|href|srcset)="([^"]+)\"""")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A Python example: where it stands, its code, and why it is not run, if it is not."""

    file: Path
    line: int
    code: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def fences(file: Path) -> Iterator[Fence]:
    """The Python examples of a file, in order."""
    text = file.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        indent, _, language, code = found.groups()
        if language.split()[:1] not in (["python"], ["py"]):
            continue
        reason = NOT_RUN.search(text[: found.start()])
        line = text.count("\n", 0, found.start()) + 2
        flush = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
        yield Fence(file, line, flush, reason and " ".join(reason[1].split()))


ALL = [fence for file in FILES for fence in fences(file)]
RUN = {
    str(file.relative_to(ROOT)): [fence for fence in ALL if fence.file == file and not fence.reason]
    for file in FILES
}


def script(examples: list[Fence]) -> str:
    """Code that runs the examples in one namespace, with tracebacks that name the real lines."""
    lines = ["space = {'__name__': '__main__'}"]
    for each in examples:
        padded = "\n" * (each.line - 1) + each.code
        lines.append(f"exec(compile({padded!r}, {str(each.file)!r}, 'exec'), space)")
    return "\n".join(lines)


@pytest.mark.parametrize("file", [file for file, examples in RUN.items() if examples])
def test_examples_run(file: str, tmp_path: Path) -> None:
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="", PYTHONIOENCODING="utf-8")
    command = [sys.executable, "-c", script(RUN[file])]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("fence", [fence for fence in ALL if fence.reason] or [None], ids=str)
def test_examples_not_run_say_why(fence: Fence | None) -> None:
    if fence is None:
        return  # every example runs
    compile(fence.code, str(fence), "exec")
    pytest.skip(f"{fence}: {fence.reason}")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_relative_links_arrive(file: Path) -> None:
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    broken = []
    for found in LINK.finditer(re.sub(r"`[^`\n]*`", "", text)):
        target, _, anchor = (found[1] or found[2]).partition("#")
        if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
            continue
        there = (file.parent / target).resolve() if target else file
        if not there.exists():
            broken.append(found[1] or found[2])
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            broken.append(found[1] or found[2])
    assert broken == []


def anchors(file: Path) -> set[str]:
    """The anchors of a Markdown file's headings."""
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    kept = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text)]
    return {heading.strip().replace(" ", "-") for heading in kept}


def test_a_failing_example_names_its_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "sample.md"
    file.write_text("# Title\n\n```python\na = 1\n```\n\n- item\n\n  ```python\n  a / 0\n  ```\n")
    first, second = fences(file)
    assert (first.line, first.code, second.line, second.code) == (4, "a = 1\n", 10, "a / 0\n")
    command = [sys.executable, "-c", script([first, second])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f'"{file}", line 10' in done.stderr


def test_a_marked_fence_carries_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "sample.md"
    file.write_text("<!-- not run: needs\na GPU -->\n```python\nx\n```\n\n```python\ny\n```\n")
    assert [fence.reason for fence in fences(file)] == ["needs a GPU", None]
