"""What uv.lock does not check: that packages agree with each other, their changelogs and the rules."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}
# Who may depend on whom; everything else is a cycle in the making.
ALLOWED_SIBLINGS = {
    "mori-bench": set(),
    "mori-tune": set(),
    "mori-shmem": {"mori-bench"},
    "mori-sim": {"mori-shmem"},
    "mori-gemm-ar": {"mori-shmem", "mori-tune", "mori-bench"},
    "mori-ep": {"mori-shmem", "mori-tune", "mori-bench"},
    "mori-megamoe": {"mori-ep", "mori-shmem", "mori-tune", "mori-bench"},
}


def requirements(project: dict) -> list[Requirement]:
    extras = project.get("optional-dependencies", {}).values()
    return [Requirement(r) for r in [*project["dependencies"], *(r for e in extras for r in e)]]


def imported_modules(package: str) -> set[str]:
    """First parts of every absolute import anywhere in a package's sources, inside functions too."""
    names: set[str] = set()
    for source in (ROOT / "packages" / package / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("name", PROJECTS)
def test_sibling_ranges_hold(name: str) -> None:
    for requirement in requirements(PROJECTS[name]):
        if requirement.name in PROJECTS:
            version = PROJECTS[requirement.name]["version"]
            assert version in requirement.specifier, f"{name} wants {requirement}, the tree has {version}"


@pytest.mark.parametrize("name", PROJECTS)
def test_changelog_has_this_version(name: str) -> None:
    text = (ROOT / "packages" / name / "CHANGELOG.md").read_text()
    version = re.escape(PROJECTS[name]["version"])
    section = re.search(rf"^## {version}\b.*?\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert section is not None
    assert section[1].strip(), f"CHANGELOG.md of {name} says nothing about its present version"


@pytest.mark.parametrize("name", PROJECTS)
def test_siblings_imported_are_declared_and_allowed(name: str) -> None:
    siblings = {m.replace("_", "-") for m in imported_modules(name) if m.startswith("mori_")} - {name}
    declared = {r.name for r in requirements(PROJECTS[name])} & PROJECTS.keys()
    assert siblings == declared & siblings, f"{name} imports {siblings - declared} without declaring it"
    assert siblings <= ALLOWED_SIBLINGS[name]
    assert declared <= ALLOWED_SIBLINGS[name]


@pytest.mark.parametrize("name", PROJECTS)
def test_PK_1_import_is_quick_and_has_no_side_effect(name: str) -> None:
    """No torch, no thread, no process, no changed environment, nothing opened under /dev."""
    code = f"""
import os, sys, threading, logging
env, handlers = dict(os.environ), list(logging.getLogger().handlers)
before = set(os.listdir('/proc/self/task'))
import {name.replace("-", "_")}
assert 'torch' not in sys.modules and 'triton' not in sys.modules and 'flydsl' not in sys.modules
assert dict(os.environ) == env and list(logging.getLogger().handlers) == handlers
assert set(os.listdir('/proc/self/task')) == before and threading.active_count() == 1
fds = [f'/proc/self/fd/{{f}}' for f in os.listdir('/proc/self/fd')]
devices = [os.readlink(f) for f in fds if os.path.exists(f) and os.readlink(f).startswith('/dev/')]
assert not [d for d in devices if d.split('/')[2] not in ('null', 'pts', 'tty', 'urandom')], devices
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=5)


def test_every_package_is_tested_linted_and_smoked() -> None:
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sorted(root["project"]["dependencies"]) == sorted(PROJECTS)
    assert set(root["tool"]["uv"]["sources"]) == set(PROJECTS)
    assert {Path(p).parent.name for p in root["tool"]["mypy"]["mypy_path"]} == set(PROJECTS)
    noxfile = (ROOT / "noxfile.py").read_text()
    for name in PROJECTS:
        assert f'"{name}": [' in noxfile, f"noxfile.SMOKE has no run for {name}"


def test_ci_runs_the_readmes_commands() -> None:
    commands = re.findall(r"^python3 -m pip install .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(commands) >= 2, "the README opens with the main job and the tests"
    assert commands[1] in (ROOT / ".ci" / "run").read_text()
