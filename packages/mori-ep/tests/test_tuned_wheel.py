"""TU-6, F2 with the op itself, from installed wheels: tuned on the host, saved, and used by new processes;
and rules that a wheel brings with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.timeout(500)
PACKAGES = Path(__file__).parent.parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]
HIDDEN, TOKENS, SHIPPED_TOKENS = 256, 24, 48
SHIPPED = {  # a rule that this test makes and puts into the wheel
    "version": "2.0",
    "op": "ep",
    "gpu_arch": os.uname().machine,
    "gpu_model": "cpu",
    "phase": "dispatch",
    "kernel_type": "IntraNode",
    "ep_size": 2,
    "rules": [
        {
            "dtype": "bf16",
            "hidden_dim": HIDDEN,
            "topk": 8,
            "num_tokens": SHIPPED_TOKENS,
            "block_num": 1,
            "rdma_block_num": 0,
            "warp_per_block": 1,
            "low_latency": "yes",
        }
    ],
}


class Installed(NamedTuple):
    base: Path
    run: Run  # Python there


def find_uv() -> str | None:
    beside = str(Path(sys.executable).parent)
    return os.environ.get("UV") or shutil.which("uv") or shutil.which("uv", path=beside)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Wheels of the op and of mori-tune, installed before everything else; torch and mori-shmem are those of
    this environment."""
    uv = find_uv()
    if uv is None:
        pytest.skip("needs uv, to build wheels and install them")
    base = tmp_path_factory.mktemp("installed")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MORI_", "PYTHON", "RANK", "LOCAL_"))}
    paths = {"HOME": str(base), "PYTHONPATH": str(base / "site"), "MORI_TUNE_DIR": str(base / "rules")}
    clean |= {**paths, "UV_CACHE_DIR": clean.get("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))}

    def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env={**clean, **env}, cwd=base, capture_output=True, text=True, timeout=250
        )

    for name in ("mori-tune", "mori-ep"):
        copy = base / "src" / name
        shutil.copytree(PACKAGES / name, copy, ignore=shutil.ignore_patterns("tests", "__pycache__"))
        if name == "mori-ep":
            tuned = copy / "src" / "mori_ep" / "tuned"
            tuned.mkdir(exist_ok=True)
            (tuned / "made_by_a_test.json").write_text(json.dumps(SHIPPED))
        done = run(uv, "build", "-q", "--wheel", f"--out-dir={base / 'dist'}", str(copy))
        assert done.returncode == 0, done.stderr
    shutil.rmtree(base / "src")
    wheels = [str(wheel) for wheel in (base / "dist").glob("*.whl")]
    done = run(uv, "pip", "install", "-q", "--no-deps", f"--target={base / 'site'}", *wheels)
    assert done.returncode == 0, done.stderr
    return Installed(base, lambda *arguments, **env: run(sys.executable, *arguments, **env))


PROBLEM = ("--op", "ep", "--tokens", str(TOKENS), "--hidden", str(HIDDEN), "--backend", "host")

# Ops of several shapes, made under several environments in turn. What they say is parted by lines of "====".
USES = f"""
    import json, os, sys
    import torch
    import mori_ep, mori_shmem, mori_tune
    from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp

    assert "site" in mori_ep.__file__ and "site" in mori_tune.__file__
    BASE = {{"hidden_dim": {HIDDEN}, "max_num_inp_token_per_rank": {TOKENS}, "num_experts_per_token": 8}}
    BASE |= {{"num_experts": 64, "data_type": torch.bfloat16}}
    OTHERS = [
        {{}}, {{"hidden_dim": 128}}, {{"num_experts_per_token": 4}}, {{"max_num_inp_token_per_rank": 25}},
        {{"data_type": torch.float16}}, {{"max_num_inp_token_per_rank": {SHIPPED_TOKENS}}},
    ]

    def ops(environment):
        os.environ.update(environment)
        found = []
        with mori_shmem.init("host", timeout_s=60) as comm:
            for other in OTHERS:
                config = EpDispatchCombineConfig.for_comm(comm, **{{**BASE, **other}})
                with EpDispatchCombineOp(config, comm) as op:
                    x = torch.randn(5, config.hidden_dim).to(config.data_type)
                    ids = torch.rand(5, 64).topk(config.num_experts_per_token).indices.int()
                    op.combine(op.dispatch(x, None, None, ids)[0], None, ids)
                    rule = op.rule("dispatch", config.data_type, tokens=config.max_num_inp_token_per_rank)
                    found.append((rule.outcome, rule.used, rule.params, op.plan.dispatch.value))
        return found

    results = []
    for environment in json.loads(sys.argv[1]):
        results.append(mori_shmem.run_ranks(ops, 2, environment, timeout_s=120))
        print("====", file=sys.stderr)
    print(json.dumps(results))
"""
COMMANDS = """
    import contextlib, io, json, sys
    from mori_tune.__main__ import main

    results = []
    for arguments in json.loads(sys.argv[1]):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(arguments)
        results.append((status, out.getvalue(), err.getvalue()))
    print(json.dumps(results))
"""
WAYS = {"yes": "slots", "no": "counts"}


def mori_tune(installed: Installed, *commands: tuple[str, ...]) -> list[tuple[int, str, str]]:
    """The commands one after the other, in one process, since starting one costs most: (exit status, what it
    printed, what it said on stderr) of each."""
    done = installed.run("-c", textwrap.dedent(COMMANDS), json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [(status, out, err) for status, out, err in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def tuned(installed: Installed) -> Installed:
    """Swept once; both phases have a rule in the user's folder."""
    done = installed.run("-m", "mori_tune", "run", *PROBLEM, "--reps", "3", "--save")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ADDED ep dispatch dtype=bf16 hidden_dim=256" in done.stdout
    assert "ADDED ep combine dtype=bf16 zero_copy=True quant_type=none hidden_dim=256" in done.stdout
    return installed


def rule_files(installed: Installed) -> dict[str, Path]:
    found = {json.loads(f.read_text())["phase"]: f for f in (installed.base / "rules").glob("*.json")}
    assert set(found) == {"dispatch", "combine"}
    return found


def test_TU_6_F2_the_op_uses_what_was_tuned_and_says_so(tuned: Installed) -> None:
    """MATCH for the very key, NO MATCH with the field for any other; the way follows the rule, either way.
    What the wheel brings is used from `tuned/` beside the code that runs, unless another file is named."""
    file = rule_files(tuned)["dispatch"]
    winner = json.loads(file.read_text())["rules"][0]["low_latency"]
    other = {"yes": "no", "no": "yes"}[winner]
    flipped = tuned.base / "flipped"
    flipped.mkdir()
    text = file.read_text().replace(f'"low_latency": "{winner}"', f'"low_latency": "{other}"')
    (flipped / "other.json").write_text(text)
    environments = [
        {},
        {"MORI_TUNE_DIR": str(flipped)},
        {"MORI_EP_TUNING_CONFIG": str(file)},
        {"MORI_EP_LAUNCH_CONFIG_MODE": "MANUAL"},
    ]
    done = tuned.run("-c", textwrap.dedent(USES), json.dumps(environments), MORI_TUNE_LOOKUP="exact")
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout)
    assert all(first == second for first, second in ranks), "all ranks launch the same"
    saved, changed, named, manual = (first for first, _ in ranks)
    said = [part.splitlines() for part in done.stderr.split("====")]

    assert [saved[0][:2], saved[0][3]] == [["MATCH", "rule"], WAYS[winner]]
    assert saved[0][2]["low_latency"] == winner
    assert [one[:3] for one in saved[1:5]] == [["NO MATCH", "default", None]] * 4
    assert sum("ep dispatch: MATCH block_num=1" in line and f"{file}:" in line for line in said[0]) == 1
    for field in ("hidden_dim asked 128", "topk asked 4", "num_tokens asked 25", "dtype asked fp16"):
        assert sum(field in line for line in said[0]) == 1, (field, said[0])
    assert [changed[0][:2], changed[0][3]] == [["MATCH", "rule"], WAYS[other]]

    place = tuned.base / "site" / "mori_ep" / "tuned" / "made_by_a_test.json"
    assert [saved[5][:2], saved[5][3]] == [["MATCH", "rule"], "slots"]
    assert sum(f"{place}:" in line for line in said[0]) == 1, said[0]
    assert named[0][0] == "MATCH"
    assert named[5][:2] == ["NO MATCH", "default"], "a file that is named is the only one"
    assert {(one[0], one[3]) for one in manual} == {("MANUAL", "counts")}
    assert any("MORI_EP_LAUNCH_CONFIG_MODE=MANUAL" in line for line in said[3])


def test_every_field_of_the_key_counts_and_the_exit_status_tells(tuned: Installed) -> None:
    fields = {
        "ep_size": ("--world-size", "4"),
        "kernel_type": ("--kernel-type", "AsyncLL"),
        "gpu_model": ("--device", f"{os.uname().machine}/other/1"),
        "dtype": ("--dtype", "fp16"),
        "hidden_dim": ("--hidden", "512"),
        "num_tokens": ("--tokens", "25"),
        "topk": ("--topk", "4"),
        "zero_copy": ("--zero-copy", "0"),
        "quant_type": ("--quant-type", "fp8_direct_cast"),
    }
    asked = [("explain", *PROBLEM, *more) for more in ((), *fields.values(), ("--combine-dtype", "fp16"))]
    (status, said, _), *others, (last_status, last, _) = mori_tune(tuned, *asked)
    assert (status, said.count(": MATCH ")) == (0, 2)
    for field, (status, said, _) in zip(fields, others, strict=True):
        assert status == 1, field
        assert f"{field} asked" in said, (field, said)
    assert last_status == 1, "of one phase alone"
    assert "ep dispatch: MATCH" in last
    assert "dtype asked fp16, rule has bf16" in last


def test_T7_verify_compares_and_never_says_so_of_a_phase_that_fell_back(tuned: Installed) -> None:
    verify = ("verify", *PROBLEM)
    alone = ("--file", str(rule_files(tuned)["dispatch"]))
    (status, both, said), (status_alone, one, _) = mori_tune(tuned, verify, (*verify, *alone))
    assert status == 0, both + said
    assert both.count("queried with bf16 -> MATCH") == 2
    assert both.count(": output equals the reference, ") == 2
    assert status_alone == 1
    assert "dispatch: verified" in one
    assert "combine rules: 0 (dtypes: none) queried with bf16 -> NO MATCH" in one
    assert "combine: NOT verified" in one
    assert "combine: verified" not in one


def test_T4_T6_what_changed_is_shown_and_a_quick_sweep_is_not_saved(tuned: Installed) -> None:
    """diff: 0 without a difference, 1 with one. Quick and save together: 2, before any rank is started."""
    old, same, new = tuned.base / "old", tuned.base / "same", str(tuned.base / "rules")
    for copy in (old, same):
        shutil.copytree(new, copy)
    for file in old.glob("*_dispatch.json"):
        file.write_text(file.read_text().replace('"low_latency": "', '"low_latency": "planned", "was": "'))
    quick = ("run", *PROBLEM, "--scope", "quick", "--save")
    none, some, refused = mori_tune(tuned, ("diff", str(same), new), ("diff", str(old), new), quick)
    assert none[0] == 0
    assert some[0] == 1
    assert "REPLACED ep dispatch" in some[1]
    assert "low_latency=planned ->" in some[1]
    assert refused[0] == 2
    assert "--scope quick" in refused[2]
    assert "--save" in refused[2]
