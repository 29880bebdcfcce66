"""The op as mori-tune sees it: problems, grids and defaults for each device, and what a visit finds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mori_ep.grids import MOST_THREADS
from mori_ep.keys import geometry_of
from mori_ep.tunable import TUNABLE, grids_of
from mori_tune import EP_DISPATCH, Device, Problem, RulesError, SpaceError
from mori_tune.__main__ import main as mori_tune
from mori_tune.commands import run as run_command
from mori_tune.commands import verify as verify_command
from mori_tune.tunable import available, load

H200 = Device("cuda", "sm_90", "h200", 132)
MI300X = Device("rocm", "gfx942", "mi300x", 304)
HOST = Device("host", "x86_64", "cpu", 1)


def problems(*arguments: str, device: Device = H200) -> list[Problem]:
    parser = argparse.ArgumentParser()
    for name in ("--tokens", "--hidden", "--world-size"):
        parser.add_argument(name, type=int, nargs="*" if name != "--world-size" else None)
    TUNABLE.add_options(parser)
    return list(TUNABLE.problems(parser.parse_args(arguments), device))


def one(*arguments: str, device: Device = H200) -> Problem:
    (found,) = problems(*arguments, device=device)
    return found


def test_the_command_line_finds_the_op_by_its_name():
    assert available()["ep"] == "mori_ep.tunable:TUNABLE"
    assert load("ep") is TUNABLE


def test_the_grids_are_those_that_such_kernels_are_known_by():
    """Candidates by device, full and quick. On cuda all 126 are points of the space; those that launch what a
    smaller one launches are refused, with that one named."""
    sizes = {}
    for kind in ("IntraNode", "InterNodeV1"):
        for device in (MI300X, Device("rocm", "gfx950", "mi355x", 256)):
            space = TUNABLE.space(one("--tokens", "4096", "--kernel-type", kind, device=device), device)
            sizes[kind, device.compute_units] = len(space.candidates("full")), len(space.candidates("quick"))
    assert sizes == {
        ("IntraNode", 304): (387, 15),
        ("IntraNode", 256): (315, 12),
        ("InterNodeV1", 304): (105, 42),
        ("InterNodeV1", 256): (90, 36),
    }
    space = TUNABLE.space(one("--tokens", "4096", "--kernel-type", "InterNodeV1"), H200)
    assert (len(space.candidates("full")), len(space.candidates("quick"))) == (90, 36)
    many = TUNABLE.space(one("--tokens", "4096"), H200)
    assert len(list(many.points("full"))) == 126
    assert [reason for _, reason in many.refused("full")] == []
    few = TUNABLE.space(one("--tokens", "8"), H200)
    assert len(list(few.points("full"))) == 2 * 126, "either way"
    refused = few.refused("full")
    assert len(refused) == 2 * 126 - len(few.candidates("full")) > 50
    assert all("same: launches what warp_per_block=" in reason for _, reason in refused)


@pytest.mark.parametrize("tokens", ["1", "8", "128", "512", "513", "4096"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "bf16", "fp4"])
def test_TU_5_every_candidate_is_a_launch_of_its_own_that_the_gpu_can_hold(tokens: str, dtype: str):
    """Blocks resident together, whole warps, no more threads than the kernel was compiled for."""
    problem = one("--tokens", tokens, "--dtype", dtype)
    space = TUNABLE.space(problem, H200)
    seen = set()
    for candidate in space.candidates("full"):
        grids = grids_of(problem, candidate.as_dict(), H200.compute_units)
        assert (candidate.as_dict().get("low_latency"), grids) not in seen, candidate
        seen.add((candidate.as_dict().get("low_latency"), grids))
        for grid in grids:
            assert 2 <= grid.blocks <= H200.compute_units
            assert grid.threads % 32 == 0
            assert grid.threads_a_row <= grid.threads <= MOST_THREADS[grid.kernel]
    default = TUNABLE.default(problem, H200)
    assert space.why_invalid(default) is None
    too_wide = default.as_dict() | {"block_num": 133, "warp_per_block": 4}
    assert "133 blocks on 132" in str(space.why_invalid(type(default).of(too_wide)))
    too_many = default.as_dict() | {"block_num": 32, "warp_per_block": 33}
    assert "1056 threads" in str(space.why_invalid(type(default).of(too_many)))


def test_on_the_host_there_are_two_ways_or_nothing_to_tune():
    for kind, tokens, usual in (
        ("IntraNode", "64", "no"),
        ("InterNode", "16", "yes"),
        ("InterNode", "17", "no"),
    ):
        problem = one("--kernel-type", kind, "--tokens", tokens, device=HOST)
        space, default = TUNABLE.space(problem, HOST), TUNABLE.default(problem, HOST)
        assert {c["low_latency"] for c in space.candidates("full")} == {"no", "yes"}
        assert default in space.candidates("full")
        assert default["low_latency"] == usual
    for kind in ("IntraNodeLL", "AsyncLL", "InterNodeV1", "InterNodeV1LL"):
        with pytest.raises(SpaceError, match=f"{kind} has nothing to tune on the host, its defaults suffice"):
            TUNABLE.space(one("--kernel-type", kind, device=HOST), HOST)


def test_F3_problems_carry_both_dtypes_and_each_phase_asks_with_its_own():
    found = problems("--kernel-type", "IntraNode,AsyncLL", "--zero-copy", "0,1", "--tokens", "8", "128")
    assert len({str(p) for p in found}) == len(found) == 8
    problem = found[0]
    dispatch, combine = (TUNABLE.query(problem, phase, H200) for phase in ("dispatch", "combine"))
    assert (dispatch.key["dtype"], combine.key["dtype"]) == ("fp8_e4m3", "bf16")
    assert dispatch.key["hidden_dim"] == combine.key["hidden_dim"] == 7168
    assert (combine.key["zero_copy"], combine.key["quant_type"]) == (False, "none")
    assert dispatch.header == {"kernel_type": "IntraNode", "ep_size": 2}
    packed = one("--dtype", "fp4", "--tokens", "8")
    assert TUNABLE.query(packed, "dispatch", H200).key["hidden_dim"] == 3584, "two numbers in an element"
    assert TUNABLE.query(packed, "combine", H200).key["hidden_dim"] == 7168
    assert one("--tokens", "8")["scale_dim"] == 56
    assert one("--tokens", "8", "--quant-type", "fp8_blockwise")["zero_copy"] is False


# ---- what is refused before a rank is started ----

IMPOSSIBLE = {
    "num_experts_per_token=99: at most 31": ("--topk", "99", "--experts", "128"),
    "topk=8 of experts=4": ("--experts", "4"),
    "num_experts=65 cannot be shared out evenly among 2 ranks": ("--experts", "65"),
    "hidden_dim=0": ("--hidden", "0"),
    "two numbers are one element": ("--dtype", "fp4", "--hidden", "65"),
    "they are int32": ("--tokens", "1000000000"),
    "fp8_blockwise is a transport for bfloat16 rows": (
        *("--quant-type", "fp8_blockwise", "--combine-dtype", "fp16"),
    ),
    "use_external_inp_buf=False would be ignored": ("--quant-type", "fp8_direct_cast", "--zero-copy", "1"),
    "fp4_blockwise goes with IntraNode": ("--quant-type", "fp4_blockwise", "--kernel-type", "AsyncLL"),
    "gpu_per_node=3 does not divide world_size=2": (
        *("--kernel-type", "InterNode", "--ranks-per-node", "3"),
    ),
}


@pytest.mark.parametrize("command", ["run", "verify", "explain"])
@pytest.mark.parametrize("reason", IMPOSSIBLE)
def test_a_problem_that_no_op_can_be_made_for_is_refused_before_any_rank_starts(
    command: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit status 2, with the op's own reason."""
    for module in (run_command, verify_command):
        monkeypatch.setattr(module, "crew_for", None)  # what would start ranks
    arguments = ["--op", "ep", "--backend", "host", "--tokens", "8,16", *IMPOSSIBLE[reason]]
    assert mori_tune([command, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mori-tune: kernel_type=")
    assert reason in said.err
    assert said.err.count("\n") == 1


def test_what_is_possible_on_one_backend_is_not_refused_while_it_may_be_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The host has a way across nodes, and rows of any size; cuda has not."""
    arguments = ["explain", "--op", "ep", "--hidden", "65", "--tokens", "8"]
    assert mori_tune([*arguments, "--backend", "host"]) == 1, "there are no rules"
    assert "NO MATCH" in capsys.readouterr().out
    assert mori_tune([*arguments, "--device", str(H200)]) == 2
    assert "multiples of 16 bytes" in capsys.readouterr().err


def test_the_command_line_needs_no_torch_until_a_problem_is_checked() -> None:
    code = "import sys, mori_ep.tunable; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "odd", [{"low_latency": "sometimes"}, {"block_num": 4000}, {"warp_per_block": "four"}], ids=str
)
def test_explain_does_not_call_a_match_what_the_op_refuses(
    odd: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same words as the op's, with file and line; a rule for another number of tokens is enough."""
    head = {"version": "2.0", "op": "ep", "gpu_arch": os.uname().machine, "gpu_model": "cpu"}
    head |= {"phase": "dispatch", "kernel_type": "IntraNode", "ep_size": 2}
    key = {"dtype": "bf16", "hidden_dim": 256, "topk": 8}
    good = {"block_num": 1, "rdma_block_num": 0, "warp_per_block": 1, "low_latency": "yes"}
    file = tmp_path / "rules.json"
    arguments = ["explain", "--op", "ep", "--backend", "host", "--hidden", "256", "--file", str(file)]
    for tokens in ("40", "8"):
        for params, status in ((good, 1), ({**good, **odd}, 2)):
            rules = [{**key, "num_tokens": 8, **params}]
            file.write_text(json.dumps({**head, "rules": rules}))
            assert mori_tune([*arguments, "--tokens", tokens]) == status
            said = capsys.readouterr()
            assert ("ep dispatch: MATCH" in said.out) == (status == 1 and tokens == "8")
            if status == 2:
                assert f"{file}:1: " in said.err
                assert "remove the rule" in said.err
                with pytest.raises(RulesError, match="remove the rule"):
                    geometry_of(EP_DISPATCH.params_in(rules[0]), f"{file}:1")


# ---- what a visit finds, on the host ----


def tune(tmp_path: Path, *arguments: str, op: str = "ep", **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MORI_", "RANK", "LOCAL_", "WORLD_"))}
    clean |= {"HOME": str(tmp_path), "MORI_TUNE_DIR": str(tmp_path / "rules")}
    clean |= {"PYTHONPATH": str(Path(__file__).parent / "faulty_op"), **env}
    small = ("--backend", "host", "--tokens", "9", "--hidden", "128", "--reps", "2")
    command = [sys.executable, "-m", "mori_tune", "run", "--op", op, *small, *arguments]
    return subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=450)


@pytest.mark.timeout(500)
def test_F4_TU_a_candidate_that_is_wrong_or_dies_costs_only_its_own_slot(tmp_path: Path):
    """One byte of one row is enough, or one element of one sum. The candidate that is right is measured, wins
    and is saved."""
    faults = ("dispatch", "combine", "death")
    done = tune(tmp_path, "--save", op="faulty_ep:TUNABLE", MORI_TEST_FAULTS=",".join(faults))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 4 candidates failed" in done.stdout
    for said in (
        "warp_per_block=2 low_latency=yes: wrong (rank 1): dispatch: 1 of ",
        "warp_per_block=3 low_latency=yes: wrong (rank 1): combine: rel_l2 ",
        "warp_per_block=4 low_latency=yes: died (rank 1): exit status 7",
    ):
        assert said in done.stdout, done.stdout
    assert "dispatch: winner block_num=1 rdma_block_num=0 warp_per_block=1 low_latency=no" in done.stdout
    assert done.stdout.count("ADDED ep ") == 2


@pytest.mark.timeout(500)
def test_both_phases_are_timed_in_one_sweep_across_nodes(tmp_path: Path):
    """Two nodes of one rank each, by gloo: the switch between the kinds is what is tuned."""
    done = tune(tmp_path, "--kernel-type", "InterNode", "--save", op="faulty_ep:TUNABLE")
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[Any] = [line for line in done.stdout.splitlines() if line.startswith("RESULT_JSON")]
    assert len(rows) == 2
    assert all('"validated": true' in row for row in rows)
    assert "ADDED ep dispatch" in done.stdout
    assert "2 candidates" in done.stdout
