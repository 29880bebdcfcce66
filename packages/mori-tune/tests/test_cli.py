"""The command line: what is refused before a launch, what is printed, and exit statuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mori_tune import Query
from mori_tune.device import host_device
from mori_tune.report import Progress, clock, table
from mori_tune.rules.saving import save_rules
from mori_tune.search import Request

Cli = Callable[..., subprocess.CompletedProcess[str]]
TOY = ("--op", "toy_op.op:TOY")


@pytest.mark.parametrize("variable", [True, False])
def test_TU_4_quick_and_save_are_refused_before_any_launch(cli: Cli, tmp_path: Path, variable: bool) -> None:
    option = () if variable else ("--scope", "quick")
    env = {"MORI_TUNING_SCOPE": "quick"} if variable else {}
    done = cli("run", *TOY, *option, "--save", **env)
    assert done.returncode == 2
    for knob in ("--scope quick", "MORI_TUNING_SCOPE", "--save"):
        assert knob in done.stderr
    assert "problem" not in done.stderr, "nothing was launched"
    assert not (tmp_path / "rules").exists()


def test_T6_quick_without_a_target_is_for_looking_around(cli: Cli, tmp_path: Path) -> None:
    done = cli("run", *TOY, "--scope", "quick", "--save", "", "--reps", "3")
    assert done.returncode == 0, done.stderr
    assert "quick scope" in done.stdout
    assert "nothing saved" in done.stderr, "said at WARNING"
    assert not (tmp_path / "rules").exists()


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (("--reps", "1"), {}, "wanted a whole number from 2"),
        ((), {"MORI_EP_ROUNDS": "1"}, "MORI_EP_ROUNDS='1'"),
        (("--margin", "-1"), {}, "wanted a number from 0"),
        ((), {"MORI_EP_TUNING_MARGIN": "abc"}, "MORI_EP_TUNING_MARGIN='abc'"),
        (("--reps", "3", "--warmup", "3"), {}, "leaves no round"),
        (("--tokens", "4,x"), {}, "4,8,16"),
        (("--tokens", ""), {}, "4,8,16"),
        (("--budget", "0.5"), {}, "1 to 100"),
        (("--limit", "0"), {}, "seconds"),
        (("--scope", "fast"), {}, "quick"),
        (("--world-size", "0"), {}, "at least 1"),
        (("--dtype", "int4"), {}, "bf16"),
        (("--no-such",), {}, "unrecognized"),
    ],
)
def test_T8_bad_options_and_variables_are_refused_with_their_range(
    cli: Cli, arguments: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    done = cli("run", *TOY, *arguments, **env)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "problem 1" not in done.stderr


def test_one_command_tunes_saves_verifies_and_explains_a_batch(cli: Cli, tmp_path: Path) -> None:
    run = cli(
        *("run", *TOY, "--tokens", "2,4", "--hidden", "64,128", "--save", "--reps", "3", "--budget", "2"),
        *("--json", str(tmp_path / "results"), "--trace", str(tmp_path / "trace")),
    )
    assert run.returncode == 0, run.stderr
    lines = (tmp_path / "results").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [f"RESULT_JSON {line}" in run.stdout for line in lines] == [True] * 8
    assert len(results) == 8
    wanted = (
        "op backend device world_size mode shape median_us min_us max_us spread_pct max_rank_time_us wall_us"
    )
    wanted = {*wanted.split(), "host_enqueue_us", "rel_l2", "validated", "reps", "commit", "versions"}
    assert wanted <= set(results[0])
    assert all(r["validated"] is True for r in results)
    assert run.stdout.count("ADDED toy dispatch") == 4
    assert run.stdout.count("ADDED toy combine") == 4
    spans = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert {"sweep", "canary"} <= {span["cat"] for span in spans}

    verify = cli("verify", *TOY, "--tokens", "2,4", "--hidden", "64")
    assert verify.returncode == 0, verify.stdout + verify.stderr
    assert verify.stdout.count("queried with fp8 -> MATCH") == 2
    assert verify.stdout.count("queried with bf16 -> MATCH") == 2
    assert "dispatch rules: 4 (dtypes: fp8)" in verify.stdout
    assert verify.stdout.rstrip().endswith("all phases of all problems verified")

    bad = cli("verify", *TOY, "--tokens", "2", "--hidden", "64", "--dtype", "bf16")
    assert bad.returncode == 1
    assert "dispatch rules: 4 (dtypes: fp8) queried with bf16 -> NO MATCH" in bad.stdout
    assert "dispatch: NOT verified: toy dispatch: NO MATCH" in bad.stdout
    assert "combine: verified" in bad.stdout, "the phase that has a rule is checked all the same"
    assert "dispatch: verified" not in bad.stdout
    assert bad.stdout.rstrip().endswith("NOT verified")

    for dtype, code in (("fp8", 0), ("bf16", 1)):
        explain = cli("explain", *TOY, "--tokens", "4", "--hidden", "128", "--dtype", dtype)
        assert explain.returncode == code
        assert "user folder" in explain.stdout
    show = cli("show", *TOY)
    assert show.stdout.count("num_tokens=") == 8
    assert "x86_64_cpu_Toy_ep2_dispatch.json" in show.stdout or "_Toy_ep2_dispatch.json" in show.stdout
    again = cli("run", *TOY, "--tokens", "2", "--hidden", "64", "--save", "--reps", "3")
    assert again.stdout.count("REPLACED toy") == 2
    assert "->" in again.stdout


def test_T7_verify_runs_the_saved_geometry_and_compares_its_output(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that is there, matches, and gives zeros; one whose process dies; one that cannot be launched."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "toy_op"))
    from toy_op.faulty import FORMAT

    def verify(what: str) -> subprocess.CompletedProcess[str]:
        query = Query(FORMAT, host_device(2), {"world_size": 2}, {"kind": "x", "size": 1})
        save_rules([(query, {"what": what, "latency_us": 50.0})], tmp_path / "rules", [FORMAT])
        return cli(
            "verify", "--op", "toy_op.faulty:FAULTY", "--what", "quick,zeros,dies,refused", "--limit", "5"
        )

    good = verify("quick")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "run: verified: what=quick: output equals the reference, 50.00 us (saved: 50.0 us)" in good.stdout
    for what, said in (("zeros", "wrong (rank"), ("dies", "signal 9"), ("refused", "too large")):
        bad = verify(what)
        assert bad.returncode == 1
        assert "MATCH" in bad.stdout
        assert said in bad.stdout
        assert "NOT verified" in bad.stdout
        assert ": verified" not in bad.stdout


def test_diff_exits_as_diff_does(cli: Cli, tmp_path: Path) -> None:
    head = {
        "version": "2.0",
        "op": "ep",
        "gpu_arch": "gfx942",
        "gpu_model": "mi300x",
        "kernel_type": "IntraNode",
    }
    rule = {"dtype": "fp8", "num_tokens": 4, "hidden_dim": 7168, "block_num": 8, "rdma_block_num": 0}
    table_ = {**head, "ep_size": 8, "phase": "dispatch"}
    (tmp_path / "a.json").write_text(json.dumps({**table_, "rules": [{**rule, "warp_per_block": 4}]}))
    (tmp_path / "b.json").write_text(json.dumps({**table_, "rules": [{**rule, "warp_per_block": 8}]}))
    assert cli("diff", "a.json", "a.json").returncode == 0
    done = cli("diff", "a.json", "b.json")
    assert done.returncode == 1
    assert "REPLACED ep dispatch" in done.stdout
    missing = cli("diff", "a.json", "nowhere.json")
    assert missing.returncode == 2
    assert "nowhere.json" in missing.stderr


def test_PK_4_every_setting_can_be_shown(cli: Cli) -> None:
    done = cli("show", "--settings", MORI_EP_ROUNDS="12")
    assert "MORI_EP_ROUNDS=12   (environment; a whole number from 2 to 100000" in done.stdout
    assert "MORI_EP_TUNING_MARGIN=0.0   (default" in done.stdout


def test_T9_verbose_prints_each_visits_table(cli: Cli) -> None:
    done = cli("run", "--op", "toy_op.faulty:FAULTY", "--what", "quick,slow", MORI_EP_TUNING_VERBOSE="1")
    assert done.stderr.count("Average") >= 3
    assert "round 9" in done.stderr
    assert "rank 1" in done.stderr
    assert "worst_rank_us" in done.stdout


def test_a_closed_pipe_is_not_a_traceback(toy_env: dict[str, str]) -> None:
    command = f"{sys.executable} -m mori_tune show --settings | head -1"
    done = subprocess.run(["bash", "-c", command], env=toy_env, capture_output=True, text=True, timeout=30)
    assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_how_far_and_how_long(fake_crew: Any, tune_fake: Any) -> None:
    crew = fake_crew(lambda c, number, rank: 100.0 + len(c["name"]))
    stream = Terminal()
    progress = Progress(stream, now=crew.clock)
    tuned = tune_fake(["a", "bb", "ccc"], crew)
    progress.begins(tuned)
    crew.clock.seconds += 4
    progress.visited(tuned, Request(0, "sweep"), tuned.search.entries[0].visits[0].times, 1, 1.0)
    assert "[" in stream.getvalue()
    assert "of at most" in stream.getvalue()
    assert "left" in stream.getvalue()
    assert "\r" in stream.getvalue()


def test_small_pieces_of_the_report() -> None:
    assert clock(59.6) == "1:00"
    assert clock(3723) == "1:02:03"
    assert table([["a", "b"], ["long", "1"]]).splitlines() == ["a     b", "----  -", "long  1"]


def test_a_place_where_nothing_can_be_written_is_refused_before_the_sweep(cli: Cli) -> None:
    done = cli("run", *TOY, "--save", "/proc/nope/x.json")
    assert done.returncode == 2
    assert "--save /proc/nope/x.json: nothing can be written in /proc/nope" in done.stderr
    assert "problem" not in done.stderr, "nothing was launched"


def test_rules_of_a_file_that_is_not_there_are_not_none(cli: Cli) -> None:
    done = cli("show", *TOY, "--file", "nofile.json")
    assert (done.returncode, done.stderr.count("nofile.json: no such file or folder")) == (2, 1)


@pytest.mark.parametrize("spoil", ["file in the way", "duplicate rules", "json folder"])
def test_what_cannot_be_written_is_refused_before_the_sweep(cli: Cli, tmp_path: Path, spoil: str) -> None:
    """Not after hours of measuring."""
    option = ("--save", str(tmp_path / "target"))
    if spoil == "file in the way":
        (tmp_path / "target").write_text("")
    elif spoil == "duplicate rules":
        (tmp_path / "target").mkdir()
        done = cli("run", *TOY, "--reps", "3", *option)
        (file, _) = sorted((tmp_path / "target").iterdir())
        line = next(x for x in file.read_text().splitlines() if "num_tokens" in x)
        file.write_text(file.read_text().replace(line, f"{line},\n{line}"))
    else:
        option = ("--json", str(tmp_path / "no" / "such" / "results"))
    done = cli("run", *TOY, "--reps", "3", *option)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stderr
    assert "average_us" not in done.stdout
    assert "mori-tune: " in done.stderr


def test_parameters_that_no_rule_can_hold_are_refused(
    cli: Cli, toy_env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "lossy.py").write_text(
        "from toy_op.op import Toy\nfrom mori_tune import Space, Parameter\n"
        "class Lossy(Toy):\n"
        "    def space(self, problem, device):\n"
        "        hardware = super().space(problem, device).hardware\n"
        "        return Space('lossy', hardware, (Parameter('unroll', (1, 2)),))\n"
        "IT = Lossy()\n"
    )
    done = cli("run", "--op", "lossy:IT", PYTHONPATH=f"{toy_env['PYTHONPATH']}:{tmp_path}")
    assert done.returncode == 2
    assert "space lossy tunes unroll, which rules of dispatch lack" in done.stderr
