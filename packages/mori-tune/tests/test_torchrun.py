"""Under torchrun: rank 0 decides for all, the others try candidates for it and end with it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest
from mori_tune import LaunchError
from mori_tune.slots.stations import StationPlan
from mori_tune.slots.torchrun import be_an_agent, gather_agents, is_under_torchrun, password, ports


def start(
    env: dict[str, str], rank: int, world_size: int, port: int, *arguments: str
) -> subprocess.Popen[str]:
    """What torchrun does for one rank."""
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": f"run-{port}"}
    own |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "mori_tune", *arguments],
        env={**env, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def port() -> int:
    """A port that is taken, as torchrun's is: the ranks must meet beside it."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])


def test_ranks_meet_and_rank_0_decides(toy_env: dict[str, str], tmp_path: Path, port: int) -> None:
    command = (
        "run",
        "--op",
        "toy_op.faulty:FAULTY",
        "--what",
        "slow,dies-on-1,quick",
        "--limit",
        "5",
        "--save",
    )
    ranks = [start(toy_env, rank, 2, port, *command) for rank in (1, 0)]
    (_, said_1), (out_0, said_0) = (r.communicate(timeout=40) for r in ranks)
    assert [r.returncode for r in ranks] == [0, 0], said_0 + said_1
    assert "winner what=quick" in out_0
    assert "dies-on-1: died (rank 1)" in out_0
    assert "ADDED" in out_0
    assert said_1 == "", "one rank speaks"


def test_an_agent_whose_leader_fails_ends_too(toy_env: dict[str, str], port: int) -> None:
    command = ("run", "--op", "toy_op.faulty:FAULTY", "--what", "raises")
    ranks = [start(toy_env, rank, 2, port, *command) for rank in (0, 1)]
    codes = [(r.communicate(timeout=40), r.returncode)[1] for r in ranks]
    assert codes == [1, 0]


def test_world_size_must_agree_with_torchruns(toy_env: dict[str, str], port: int) -> None:
    rank = start(toy_env, 0, 2, port, "run", "--op", "toy_op.op:TOY", "--world-size", "4")
    _, said = rank.communicate(timeout=30)
    assert rank.returncode == 2
    assert "--world-size 4, but torchrun's WORLD_SIZE make 2" in said


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert is_under_torchrun(environ)
    assert not is_under_torchrun({"RANK": "1"})
    with pytest.raises(LaunchError, match=r"rank 1: no rank 0 at 127\.0\.0\.1"):
        be_an_agent(environ, limit_s=0.5)
    with pytest.raises(LaunchError, match=r"ranks \[1, 2\] did not come"):
        gather_agents(StationPlan("x", (), 3), SimpleQueue(), {**environ, "RANK": "0"}, limit_s=0.5)


def test_two_runs_on_one_machine_do_not_take_each_others_ranks() -> None:
    one = {"MASTER_ADDR": "a", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    assert password(one) != password({**one, "TORCHELASTIC_RUN_ID": "y"})
    assert 29500 not in ports(one)
