"""Everything that checks this repository: `nox` runs lint and tests, `nox -l` lists the rest.

Each package is tested in an environment that holds only what that package declares, so that a
forgotten dependency shows. `nox --no-venv` uses the environment it is started from instead: on an AMD
host that is the one whose torch is the ROCm build.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(p.parent.name for p in ROOT.glob("packages/*/pyproject.toml"))
PYTHONS = ["3.11", "3.12", "3.13"]
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", f"tests-{THIS_PYTHON}"]

WITH_KERNELS = [p for p in PACKAGES if list(ROOT.glob(f"packages/{p}/tests/test_cuda*.py"))]
NODE = {"mori-shmem": ["--group=sim"], "mori-gemm-ar": ["--group=sim"]}  # rocm: brings the software node
# Most tests wait for processes to start or for each other. A file stays in one worker: its tests share ranks.
IN_PARALLEL = ["-n", str(min(4, os.cpu_count() or 1)), "--dist=loadfile"]

SMOKE = {  # what must run from the wheel alone, away from the sources
    "mori-bench": ["mori-bench", "--help"],
    "mori-shmem": ["python", "-c", "import mori_shmem as s; s.run_ranks(lambda: s.init().self_test(), 2)"],
    "mori-sim": ["mori-sim", "run", "--devices", "2", "--", "python", "-m", "mori_sim.smoke"],
    "mori-gemm-ar": [
        *["mori-gemm-ar-bench", "--world-size", "2", "--mode", "all"],
        *["-m", "65", "-n", "256", "-k", "256", "--reps", "2"],
    ],
    "mori-ep": ["mori-ep-bench", "test", "--world-size", "2", "--tokens", "9", "--hidden", "256"],
    "mori-megamoe": ["mori-megamoe-bench", "test", "--world-size", "2", "--tokens", "9", "--experts", "8"],
    "mori-tune": ["mori-tune", "run", "--op", "mori_tune.example:COPY", "--reps", "3"],
}


def sync(session: nox.Session, *args: str) -> None:
    """Bring the session's environment to what uv.lock says; with --no-venv keep the caller's."""
    # Images often forbid bytecode files. Each process that imports torch would compile it again, 2 s of it.
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    if session.venv_backend == "none":
        return
    here = session.virtualenv.location
    session.run_install(
        "uv", "sync", "--locked", f"--python={here}", *args, env={"UV_PROJECT_ENVIRONMENT": here}
    )


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy --strict on every package's src, and the checks of the workspace itself."""
    sync(session, "--group=lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *(f"packages/{p}/src" for p in PACKAGES))
    session.run("pytest", "-q", "tests", "-m", "not docs")


@nox.session(python=PYTHONS)
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """One package's tests, with what it declares and nothing else."""
    sync(session, f"--package={package}", "--all-extras", "--group=dev")
    session.run("pytest", "-m", "not kernels", *IN_PARALLEL, f"packages/{package}/tests", *session.posargs)


@nox.session(python=PYTHONS)
@nox.parametrize("package", WITH_KERNELS, ids=WITH_KERNELS)
def kernels(session: nox.Session, package: str) -> None:
    """GPU kernels without a GPU: gfx950 code and SDMA packets on the software node, CUDA emulated."""
    sync(session, f"--package={package}", "--all-extras", "--group=dev", *NODE.get(package, ()))
    session.run("pytest", "-m", "kernels", *IN_PARALLEL, f"packages/{package}/tests", *session.posargs)


def gpu_tests(session: nox.Session, num_gpus: int) -> None:
    sync(session, "--all-packages", "--group=dev")
    run = ("python", "tools/gpu_run", "pytest", "-m", "gpu", f"--num-gpus={num_gpus}", "packages")
    session.run(*run, *session.posargs)


@nox.session(name="test-8gpu", tags=["gpu"])
def test_8gpu(session: nox.Session) -> None:
    """Every test marked gpu, for a node of 8; skipped with the reason where GPUs are missing."""
    gpu_tests(session, 8)


@nox.session(name="test-2gpu", tags=["gpu"])
def test_2gpu(session: nox.Session) -> None:
    """The tests marked gpu that two GPUs can run."""
    gpu_tests(session, 2)


@nox.session(python=PYTHONS, reuse_venv=False)
def build(session: nox.Session) -> None:
    """sdist -> wheel -> clean environment for each package -> import -> smoke run -> uninstall."""
    tmp = Path(session.create_tmp()).resolve()
    dist, away = tmp / "dist", tmp / "away"
    away.mkdir(exist_ok=True)
    session.run_install(
        *["uv", "build", "--all-packages", f"--python={session.python}", f"--out-dir={dist}", "--clear"],
        external=True,
    )
    for package in PACKAGES:
        (wheel,) = dist.glob(f"{package.replace('-', '_')}-*.whl")
        with session.chdir(away):
            install_and_run(session, package, wheel, away / package)


def install_and_run(session: nox.Session, package: str, wheel: Path, env: Path) -> None:
    """In an environment of its own, whose programs are named by their paths: the session's come first on
    PATH."""
    name = package.replace("-", "_")
    shutil.rmtree(env, ignore_errors=True)
    session.run("uv", "venv", "-q", f"--python={session.python}", str(env), external=True)
    python, path = str(env / "bin" / "python"), f"{env}/bin{os.pathsep}{os.environ['PATH']}"

    def run(program: str, *arguments: str) -> None:
        command = ("env", f"PATH={path}", f"VIRTUAL_ENV={env}", str(env / "bin" / program), *arguments)
        session.run(*command, external=True)

    def pip(*arguments: str) -> None:
        session.run("uv", "pip", *arguments, f"--python={python}", external=True)

    # Not the copy that uv has of a wheel seen at the same path before.
    fresh = [f"--refresh-package={p}" for p in PACKAGES]
    pip("install", "-q", f"--find-links={wheel.parent}", *fresh, str(wheel))
    pip("check")
    run("python", "-I", "-c", f"import {name}, sys; assert sys.prefix == {str(env)!r}, sys.prefix")
    run(*SMOKE[package])
    pip("uninstall", "-q", package)
    installed = env.glob(f"lib/python*/site-packages/{name}/**/*")
    left = [p for p in installed if p.is_file() and p.suffix != ".pyc"]
    if left:
        session.error(f"uninstalling {package} leaves {left}")
    shutil.rmtree(env)


@nox.session
def docs(session: nox.Session) -> None:
    """Runs every command and Python block of README.md and docs/ that needs no special hardware."""
    sync(session, "--all-packages", "--all-extras", "--group=dev")
    session.run("pytest", "-q", "tests/test_docs.py", *session.posargs)


@nox.session(name="bench-smoke")
def bench_smoke(session: nox.Session) -> None:
    """Every package's bench entry point, at its default size for this machine."""
    sync(session, "--all-packages", "--group=dev")
    session.run("mori-shmem-bench")
    session.run("mori-gemm-ar-bench")
    session.run("mori-ep-bench")
    session.run("mori-megamoe-bench")
    session.run("mori-tune", "run", "--op", "mori_tune.example:COPY")


@nox.session
def sanitize(session: nox.Session) -> None:
    """The C++ tests of mori-shmem's core under ThreadSanitizer and under Address+UBSanitizer."""
    if session.venv_backend != "none":
        session.install("cmake>=3.18", "ninja")
    for kind in ("thread", "address"):
        tree = ROOT / "build" / f"sanitize-{kind}"
        session.run(
            *["cmake", "-G", "Ninja", "-S", "packages/mori-shmem", "-B", str(tree)],
            *["-DMORI_SHMEM_TESTS=ON", f"-DMORI_SANITIZE={kind}"],
            external=True,
        )
        session.run("cmake", "--build", str(tree), "-j2", external=True)
        session.run("ctest", "--test-dir", str(tree), "--output-on-failure", external=True)
