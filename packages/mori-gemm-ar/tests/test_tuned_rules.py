"""Tuned rules in the op: whose are used, for which M, what refuses them; what the tuner sees of the op."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.options import resolve
from mori_gemm_ar.rules import tuned_names, with_rule
from mori_gemm_ar.testing import gx, gx_want
from mori_gemm_ar.tunable import TUNABLE, options_of
from mori_shmem.errors import ArgumentError
from mori_tune import GEMM_AR, Book, Candidate, Device, RulesError, SpaceError
from mori_tune.settings import Settings

N, K = 136, 256
H200 = Device("cuda", "sm_90", "h200", 132)


def write_rules(folder: Path, rules: list[dict[str, object]], mode: str = "fused-sdma") -> None:
    folder.mkdir()
    head = {"version": "2.0", "op": "gemm-ar", "gpu_arch": os.uname().machine, "gpu_model": "cpu"}
    key = {"quant": "blockscale", "gather_dtype": "bf16", "gather_transport": "sdma", "n": N, "k": K}
    table = {**head, "mode": mode, "world_size": 2, "phase": "layer", "rules": [{**key, **r} for r in rules]}
    (folder / "rules.json").write_text(json.dumps(table))


def ops_with(folders: list[str], environment: dict[str, str]) -> list[object]:
    """What an op uses at three M, and whether its results are right; or the error it was refused with."""
    rank = int(os.environ["RANK"])
    os.environ.update({"MORI_TUNE_DIR": folders[rank], **environment})
    with mori_shmem.init("host", timeout_s=20) as comm:
        try:
            with GemmAllReduce(comm, n=N, k=K, m_max=400) as op:
                chunks = []
                for m in (100, 300, 400):
                    g = gx(m, N, K, comm.rank, "blockscale")
                    got = op(g.a, g.b, g.a_scale, g.b_scale)
                    right = torch.equal(got, gx_want(m, N, K, comm.world_size, "blockscale"))
                    chunks.append(op.plan(m).options.chunks if right else None)
                rule = op.rule(400)
                return [chunks, None if rule is None else rule.outcome]
        except (RulesError, ArgumentError) as refusal:
            return [str(refusal)]


def test_TU_2_ranks_that_see_other_rules_use_those_of_one(tmp_path, capfd):
    """Rank 0 has none, rank 1 has two: both use rank 1's, each M its own."""
    write_rules(tmp_path / "b", [{"m": 100, "chunks": 1}, {"m": 400, "chunks": 2}])
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    found = mori_shmem.run_ranks(ops_with, 2, folders, {}, timeout_s=60)
    assert found == [[[1, 2, 2], "MATCH"]] * 2
    said = capfd.readouterr().err
    assert said.count("ranks [0] see other rules than rank 1, whose are used") == 1
    assert said.count("MATCH chunks=2 from") == 1
    assert "m asked 300" in said


def test_by_hand_no_rule_is_used_and_without_rules_nothing_is_said(tmp_path, capfd):
    write_rules(tmp_path / "a", [{"m": 400, "chunks": 2}])
    folders, manual = [str(tmp_path / "a")] * 2, {"MORI_GEMM_AR_LAUNCH_CONFIG_MODE": "MANUAL"}
    found = mori_shmem.run_ranks(ops_with, 2, folders, manual, timeout_s=60)
    assert found == [[[8, 8, 8], "MANUAL"]] * 2
    assert "MORI_GEMM_AR_LAUNCH_CONFIG_MODE=MANUAL" in capfd.readouterr().err
    found = mori_shmem.run_ranks(ops_with, 2, [str(tmp_path / "none")] * 2, {}, timeout_s=60)
    assert found == [[[8, 8, 8], None]] * 2
    assert "gemm-ar layer" not in capfd.readouterr().err


@pytest.mark.parametrize("rule", [{"chunks": 64}, {"chunks": 0}, {"lag": 3}, {"chunks": "two"}])
def test_a_rule_that_no_sweep_could_have_made_is_refused_with_its_place(rule):
    options = resolve(mode="fused-sdma")
    with pytest.raises(RulesError, match=r"rules\.json:9: (chunks|lag)=.* hold chunks, "):
        with_rule(options, rule, tuned_names(2, "host", options), "rules.json:9")


def problems(*arguments: str, device: Device = H200):
    parser = argparse.ArgumentParser()
    for name in ("--tokens", "--hidden", "--world-size"):
        parser.add_argument(name, type=int, nargs="*" if name != "--world-size" else None)
    TUNABLE.add_options(parser)
    return TUNABLE.problems(parser.parse_args(arguments), device)


def test_the_tuner_is_offered_every_mode_that_is_worth_it_with_its_default_among_the_candidates():
    found = problems()
    assert len({str(p) for p in found}) == len(found) == 12
    for problem in [*found, *problems("--tokens", "1", "4096", "16384", "--world-size", "8")]:
        space, default = TUNABLE.space(problem, H200), TUNABLE.default(problem, H200)
        assert default in space.candidates("full"), (problem, default)
        assert len(space.candidates("full")) <= 12
        query = TUNABLE.query(problem, "layer", H200)
        assert query.key["m"] == problem["m"]
        assert query.header == {"mode": problem["mode"], "world_size": problem["world_size"]}
    with pytest.raises(SpaceError, match="ranks do not meet"):
        problems("--mode", "gemm-only")
    with pytest.raises(SpaceError, match="not tuned on rocm"):
        problems(device=Device("rocm", "gfx950", "mi355x", 256))


def test_the_shipped_rules_are_measured_ones_that_calls_find():
    """Each is a candidate of its own problem's space; other M take the next larger one's, and say so."""
    book = Book("gemm-ar", (GEMM_AR,), "mori_gemm_ar", Settings({"MORI_TUNE_DIR": "/nowhere"}))
    found = problems()
    for problem in found:
        decision = book.decide(TUNABLE.query(problem, "layer", H200))
        assert decision.is_match, decision.line
        assert not decision.rule.published
        assert decision.rule.values["provenance"]["device"] == str(H200)
        numbers = Candidate.of(decision.params)
        assert TUNABLE.space(problem, H200).why_invalid(numbers) is None
        names = tuned_names(2, "cuda", options_of(problem))
        assert with_rule(options_of(problem), decision.params, names, "here").mode == problem["mode"]
    assert sum(len(table.rules) for _, table in book.all_tables()) == len(found)
    between = book.decide(TUNABLE.query(problems("--tokens", "5000")[0], "layer", H200))
    assert between.used == "nearest"
    assert "m asked 5000, rule has" in between.line
    elsewhere = book.decide(TUNABLE.query(found[0], "layer", Device("cuda", "sm_90", "h100", 132)))
    assert elsewhere.params is None
    assert "gpu_model asked h100, rule has h200" in elsewhere.line
