"""Where and from what a number came: versions, commit, processor, and whether torchrun started us."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Launched:
    """This process's place among ranks that somebody else started."""

    rank: int
    world_size: int
    local_rank: int


def launched() -> Launched | None:
    """The place that torchrun, or what sets its variables, gave us; None if ranks are ours to start."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    given = [os.environ.get(name) for name in names]
    if given[0] is None and given[1] is None:
        return None
    values = []
    for name, text in zip(names, given, strict=True):
        if text is None and name == "LOCAL_RANK":
            text = given[0]
        if text is None or not text.isdecimal():
            raise ValueError(
                f"{name}={text!r}: RANK and WORLD_SIZE must both be set, to whole numbers, or neither"
            )
        values.append(int(text))
    rank, world_size, local_rank = values
    if rank >= world_size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    return Launched(rank, world_size, local_rank)


def versions(packages: Iterable[str] = ()) -> dict[str, str | None]:
    """Installed versions of Python, mori-bench and the named packages; None where one is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("mori-bench", *packages):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


@dataclass(frozen=True)
class Commit:
    """Which source ran. `dirty`: tracked files differed from the commit; None where that cannot be known."""

    hash: str
    dirty: bool | None


@cache
def commit_of(package: str = "mori-bench") -> Commit | None:
    """The commit a package runs from: its git checkout, else what the installer recorded, else None."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is not None and spec.origin is not None:
        found = _commit_of_checkout(Path(spec.origin))
        if found is not None:
            return found
    return _commit_of_metadata(package)


def _commit_of_checkout(source: Path) -> Commit | None:
    """Only if the file is tracked: an environment that lies inside a checkout is not that checkout's code."""
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None
    head = _git(source.parent, "rev-parse", "HEAD")
    changes = _git(source.parent, "status", "--porcelain", "--untracked-files=no")
    return None if head is None else Commit(head.strip(), None if changes is None else bool(changes.strip()))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _commit_of_metadata(package: str) -> Commit | None:
    """`pip install git+URL` records the commit in direct_url.json (PEP 610)."""
    try:
        text = importlib.metadata.distribution(package).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    recorded = json.loads(text).get("vcs_info", {}).get("commit_id") if text else None
    return Commit(recorded, None) if isinstance(recorded, str) else None


@cache
def cpu_name() -> str:
    """The processor as the kernel names it, and how many cores this process may use."""
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name} ({len(os.sched_getaffinity(0))} cores)"
