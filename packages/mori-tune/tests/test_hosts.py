"""Several hosts: commands are what they should be, are shown before they run, and clean up after themselves.

`ssh`, `docker` and `sudo` are stand-ins on PATH, which note how they were called and run the command here.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from mori_tune import LaunchError
from mori_tune.slots.children import Events
from mori_tune.slots.hosts import Host, agent_command, docker_for, environ_to_pass, stations_on
from mori_tune.slots.stations import StationPlan

Cli = Callable[..., subprocess.CompletedProcess[str]]
FAKE_SSH = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0] == "-o":
    words = words[2:]
open({log!r}, "a").write("ssh " + words[0] + "\\n")
if words[0] == "unreachable":
    sys.exit("ssh: connect to host unreachable port 22: No route to host")
clean = {{k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "HOME", "MARK")}}
os.execve("/bin/sh", ["sh", "-c", words[1]], clean)
"""
FAKE_DOCKER = """#!{python}
import os, sys
open({log!r}, "a").write("docker " + " ".join(sys.argv[1:]) + "\\n")
if os.environ.get("NEEDS_SUDO") and not os.environ.get("IS_SUDO"):
    sys.exit("permission denied while trying to connect to the docker daemon")
words = sys.argv[2:]
environ = {{k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONPATH", "HOME", "MARK")}}
while words[0].startswith("-"):
    flag = words.pop(0)
    if flag == "-e":
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    elif flag == "-w":
        os.chdir(words.pop(0))
container = words.pop(0)
if container == "missing":
    sys.exit("No such container: missing")
os.execvpe(words[0], words, environ)
"""
FAKE_SUDO = """#!{python}
import os, sys
assert sys.argv[1] == "-n", "never a question for a password"
open({log!r}, "a").write("sudo\\n")
os.environ["IS_SUDO"] = "1"
os.execvp(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def fakes(tmp_path: Path, toy_env: dict[str, str]) -> Iterator[tuple[dict[str, str], Path]]:
    """An environment whose ssh, docker and sudo are stand-ins, and the file in which they note calls."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    log.write_text("")
    for name, text in (("ssh", FAKE_SSH), ("docker", FAKE_DOCKER), ("sudo", FAKE_SUDO)):
        (folder / name).write_text(text.format(python=sys.executable, log=str(log)))
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{toy_env['PATH']}", "MARK": str(tmp_path)}, log


def test_commands_are_what_a_person_would_type() -> None:
    here = Host("localhost", python="/venv/bin/python")
    assert agent_command(here) == ["/venv/bin/python", "-m", "mori_tune.slots.agent"]
    there = Host("user@node-b", python="/venv/bin/python", environ={"MORI_RDMA_TC": "41", "B": "a b"})
    *ssh, remote = agent_command(there)
    assert ssh[0] == "ssh"
    assert "BatchMode=yes" in ssh
    assert ssh[-1] == "user@node-b"
    assert remote == "env 'B=a b' MORI_RDMA_TC=41 /venv/bin/python -m mori_tune.slots.agent"
    folder = Host("b", workdir="/my dir")
    assert agent_command(folder)[-1].startswith("cd '/my dir' && exec python3 -m")
    box = Host("b", container="ctr", workdir="/w", environ={"MORI_RDMA_TC": "41"})
    assert agent_command(box, ("sudo", "-n", "docker"))[-1] == (
        "sudo -n docker exec -i -e MORI_RDMA_TC=41 -w /w ctr python3 -m mori_tune.slots.agent"
    )
    local_box = agent_command(Host("localhost", container="ctr"))
    assert local_box[:3] == ["docker", "exec", "-i"]


def test_a_variables_value_cannot_become_a_command() -> None:
    evil = "$(touch owned); rm -rf ~ '\""
    remote = agent_command(Host("b", environ={"MORI_X": evil}))[-1]
    assert f"MORI_X={evil}" in shlex.split(remote)


def test_T12_the_environment_is_passed_on_outright() -> None:
    environ = {
        "MORI_RDMA_TC": "41",
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "eth0",
        "SECRET": "s",
        "MY": "1",
    }
    passed = environ_to_pass(environ, ["MY", "OTHER=2"])
    assert passed == {k: v for k, v in environ.items() if k != "SECRET"} | {"OTHER": "2"}
    with pytest.raises(LaunchError, match="NOT_SET"):
        environ_to_pass(environ, ["NOT_SET"])
    with pytest.raises(LaunchError, match="1X"):
        environ_to_pass(environ, ["1X=3"])


def test_T12_docker_is_tried_before_sudo(
    fakes: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    env, log = fakes
    monkeypatch.setenv("PATH", env["PATH"])
    shown: list[str] = []
    assert docker_for(Host("localhost", container="ctr"), shown.append) == ("docker",)
    assert shown == ["docker exec ctr true"]
    assert "sudo" not in log.read_text()
    monkeypatch.setenv("NEEDS_SUDO", "1")
    assert docker_for(Host("localhost", container="ctr"), shown.append) == ("sudo", "-n", "docker")
    with pytest.raises(LaunchError, match=r"missing on localhost cannot be entered.*No such container"):
        docker_for(Host("localhost", container="missing"), shown.append)


def test_tuning_on_two_hosts_of_which_one_runs_a_container(
    cli: Cli, fakes: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, log = fakes
    done = cli(
        *("run", "--op", "toy_op.op:TOY", "--hosts", "localhost,node-b", "--ranks-per-host", "2"),
        *("--container", "ctr", "--python", sys.executable, "--env", "EXTRA=7", "--master-addr", "127.0.0.1"),
        *("--save", "", "--reps", "3"),
        **env,
        MORI_RDMA_TC="41",
    )
    assert done.returncode == 0, done.stderr
    assert "4 ranks" in done.stdout
    calls = log.read_text().splitlines()
    assert calls.count("ssh node-b") == 2, "one to try docker, one for the agent"
    assert any(c.startswith("docker exec -i -e EXTRA=7 ") and "-e MORI_RDMA_TC=41" in c for c in calls)
    shown = [line for line in done.stderr.splitlines() if line.startswith("+ ssh")]
    assert len(shown) == 2
    assert "MORI_RDMA_TC=41" in shown[1]
    assert until_gone(str(tmp_path)) == []


def test_a_fault_on_another_host_costs_its_slot_only(
    cli: Cli, fakes: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    env, _ = fakes
    done = cli(
        *("run", "--op", "toy_op.faulty:FAULTY", "--what", "slow,dies-on-1,quick", "--limit", "5"),
        *("--hosts", "localhost,node-b", "--ranks-per-host", "1", "--python", sys.executable),
        *("--master-addr", "127.0.0.1"),
        **env,
    )
    assert done.returncode == 0, done.stderr
    assert "what=dies-on-1: died (rank 1): died by signal 9 (SIGKILL)" in done.stdout
    assert "last words of the dying" in done.stderr, "the other host's last lines come along"
    assert "winner what=quick" in done.stdout
    assert until_gone(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts", "localhost,unreachable"], "No route to host"),
        (["--hosts", "localhost,b", "--python", "/no/python"], "lost the agent on b"),
        (["--hosts", "b,b"], "once each"),
        (["--hosts", "localhost,b", "--world-size", "3"], "--world-size 3, but"),
        (["--env", "A=1"], "of no effect without --hosts"),
        (["--python", "x", "--workdir", "/"], "--python, --workdir: of no effect without --hosts"),
        (["--hosts", "localhost", "--container", "c"], "--local-container?"),
        (["--hosts", "b", "--local-container", "c"], "does not name this machine"),
        (["--hosts", "localhost", "--local-container", "missing"], "No such container"),
    ],
)
def test_a_host_that_cannot_be_used_is_an_error_with_its_own_words(
    cli: Cli, fakes: tuple[dict[str, str], Path], tmp_path: Path, options: list[str], said: str
) -> None:
    env, _ = fakes
    each = ["--ranks-per-host", "1"] if "--hosts" in options else []
    done = cli("run", "--op", "toy_op.op:TOY", *each, *options, **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert until_gone(str(tmp_path)) == []


def test_an_agent_ends_its_ranks_when_its_driver_is_gone(
    fakes: tuple[dict[str, str], Path], toy_env: dict[str, str], tmp_path: Path
) -> None:
    env, _ = fakes
    arguments = ["--hosts", "node-b", "--ranks-per-host", "2", "--python", sys.executable, "--limit", "100"]
    what = ["run", "--op", "toy_op.faulty:FAULTY", "--what", "hangs-with-child"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mori_tune", *what, *arguments],
        env={**toy_env, **env},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while sum("slots.nest" in line for line in running(str(tmp_path))) < 5:  # two ranks, a child of each
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert until_gone(str(tmp_path)) == []


def test_stations_already_started_are_closed_when_a_later_one_fails(
    fakes: tuple[dict[str, str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    env, _ = fakes
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    events: Events = SimpleQueue()
    hosts = [Host("b", python=sys.executable), Host("localhost", container="missing")]
    plan = StationPlan("toy_op.op:TOY", (), 2)
    with pytest.raises(LaunchError, match="missing"):
        stations_on(hosts, 1, plan, events, lambda command: None)
    assert until_gone(str(tmp_path)) == []


def running(marker: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"MARK={marker}".encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return found


def until_gone(marker: str) -> list[str]:
    deadline = time.monotonic() + 30
    while (found := running(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def test_messages_are_plain_json() -> None:
    plan = StationPlan("x", (2, 3), 4, "host", 7, {"tokens": [4, 8]}, 0, True)
    assert StationPlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan
    assert plan.place(3).local_rank == 1
