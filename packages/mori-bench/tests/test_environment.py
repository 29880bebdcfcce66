"""Where a number came from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mori_bench import commit_of, cpu_name, environment, versions


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A git checkout with one tracked package, `some_package`."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "some_package.py").write_text("x = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.syspath_prepend(str(folder))
    commit_of.cache_clear()
    yield folder
    commit_of.cache_clear()
    sys.modules.pop("some_package", None)


def test_the_commit_of_a_checkout_and_whether_it_was_changed(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert commit_of("some-package") == environment.Commit(head, dirty=False)
    commit_of.cache_clear()
    (checkout / "some_package.py").write_text("x = 2\n")
    assert commit_of("some-package") == environment.Commit(head, dirty=True)


def test_an_environment_inside_a_checkout_is_not_that_checkouts_code(checkout: Path) -> None:
    (checkout / "other_package.py").write_text("")  # not tracked, as in a .venv
    assert commit_of("other-package") is None


def test_without_git_the_installers_record_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "from_git-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: from-git\nVersion: 1.0\n")
    (info / "direct_url.json").write_text('{"url": "u", "vcs_info": {"vcs": "git", "commit_id": "abc"}}')
    (tmp_path / "from_git.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    commit_of.cache_clear()
    assert commit_of("from-git") == environment.Commit("abc", dirty=None)


def test_nothing_known_is_none() -> None:
    assert commit_of("no-such-package") is None


def test_versions_name_what_is_missing() -> None:
    found = versions(["no-such-package"])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["mori-bench"] is not None
    assert found["no-such-package"] is None


def test_the_processor_has_a_name() -> None:
    assert "core" in cpu_name()
