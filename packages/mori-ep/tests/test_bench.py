"""mori-ep-bench: what it prints holds, its validation can fail, and what it cannot do it says before it
starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mori_bench.faults import FAULTS
from mori_bench.result import results_in
from mori_ep.bench import __main__ as bench
from mori_ep.bench.__main__ import main
from mori_ep.bench.routes import ids_for
from mori_tune.settings import Settings

SMALL = [
    "--world-size",
    "2",
    "--tokens",
    "9",
    "--hidden",
    "64",
    "--topk",
    "2",
    "--experts",
    "8",
    "--reps",
    "2",
]
QUICK = [*SMALL, "--rounds", "2", "--no-compare"]


def test_BE_2_a_run_prints_a_table_and_a_line_for_every_case(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--rounds", "2"]) == 0
    out = capfd.readouterr().out
    assert out.rstrip().endswith("validated")
    rows = list(results_in(out.splitlines()))
    assert [row["settings"]["phase"] for row in rows] == [  # type: ignore[index]
        *("dispatch", "combine", "pair", "pair, views anew", "all_to_all (gloo)")
    ]
    for row in rows:
        assert row["validated"] is True
        assert (row["mismatched_rows"], row["rel_l2"]) == (0, 0)
        assert row["host_enqueue_us"] <= row["wall_us"]  # type: ignore[operator]
    received, remote = rows[0]["recv_rows"], rows[0]["remote_rows"]
    assert all(0 < r < n for r, n in zip(remote, received, strict=True))  # type: ignore[arg-type]
    bandwidth = rows[0]["bandwidth"]
    assert bandwidth["remote_GBps"] < bandwidth["xgmi_GBps"] < bandwidth["ll_GBps"]  # type: ignore[index]
    assert "GB/s are means over ranks" in out
    assert "memoised views" in out


def test_T8_rounds_are_those_of_the_tuner_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """MORI_EP_ROUNDS, 10 without it; one round alone is refused by the name of the variable."""

    def rounds(*more: str) -> int:
        args = bench.parser().parse_args([*SMALL, *more])
        ((_, choice),) = bench.configurations_from(args, 2)
        return choice.rounds

    def under(value: str | None) -> None:
        fresh = Settings({} if value is None else {"MORI_EP_ROUNDS": value})
        monkeypatch.setattr(bench, "settings", lambda: fresh)

    under(None)
    assert (rounds(), rounds("--rounds", "3")) == (10, 3)
    under("25")
    assert rounds() == 25
    with pytest.raises(ValueError, match="MORI_EP_ROUNDS='1'"):
        under("1")


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_BE_1_a_broken_result_is_not_validated(fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--break", fault]) == 1
    out = capfd.readouterr().out
    assert out.rstrip().endswith("NOT VALIDATED: see above")
    assert all(row["validated"] is False for row in results_in(out.splitlines()))


@pytest.mark.parametrize(
    "options",
    [
        ["--kernel-type", "AsyncLL", "--num-qp", "2", "--routing", "zipf", "--zero-copy", "0"],
        ["--dtype", "fp8_e4m3", "--quant-type", "fp8_blockwise", "--routing", "hot-rank"],
        ["--dtype", "fp4", "--kernel-type", "IntraNodeLL", "--routing", "one-expert"],
        ["--dtype", "fp16", "--tokens", "0"],
        ["--kernel-type", "InterNodeV1", "--nodes", "2", "--engine", "gloo", "--world-size", "4"],
        [
            "--kernel-type",
            "InterNodeV1LL",
            "--engine",
            "gloo",
            "--quant-type",
            "fp8_blockwise",
            "--topk",
            "3",
        ],
    ],
    ids=lambda options: options[1],
)
def test_other_kinds_and_routes_hold_as_well(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, *options]) == 0
    assert capfd.readouterr().out.rstrip().endswith("validated")


def test_a_sweep_runs_every_combination(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "found.jsonl"
    options = ["--tokens", "1,5", "--kernel-type", "IntraNode,IntraNodeLL", "--json", str(file)]
    assert main(["sweep", *QUICK, *options]) == 0
    rows = [
        row for row in results_in(capfd.readouterr().out.splitlines()) if row["settings"]["phase"] == "pair"
    ]  # type: ignore[index]
    assert [(row["shape"]["tokens"], row["mode"]) for row in rows] == [  # type: ignore[index]
        *((1, "IntraNode"), (1, "IntraNodeLL"), (5, "IntraNode"), (5, "IntraNodeLL"))
    ]
    assert len(file.read_text().splitlines()) == 4 * 4


@pytest.mark.parametrize("kind", ["IntraNode", "AsyncLL"])
def test_the_trial_checks_odd_shapes_halves_and_replays(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *SMALL, "--kernel-type", kind]) == 0
    out = capfd.readouterr().out
    assert out.count("  yes\n") == 4 * 3 * 2
    assert "replays" in out
    assert main(["test", *SMALL, "--break", "drop_peer"]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "1,2"], "several values for --tokens: that is what `sweep` is for"),
        (["--experts", "9"], "--experts 9 cannot be shared out evenly among 2 ranks"),
        (["--topk", "9"], "--topk 9 of --experts 8"),
        (
            ["--routing", "nowhere"],
            "--routing nowhere: one of uniform, zipf, hot-rank, one-expert, or a file",
        ),
        (["--dtype", "fp8"], "'fp8': one of bf16"),
        (["--hidden", "0"], "0 is below 1"),
        (["--hidden", "999999936"], "hidden_dim=999999936: at most 16777215"),
        (["--hidden", "16000000", "--tokens", "100000"], "windows of 2 ranks need"),
        (["--json", "/nowhere/x"], "no folder /nowhere"),
        (["--dtype", "fp16", "--quant-type", "fp8_blockwise"], "fp8_blockwise is a transport for bfloat16"),
        (["--kernel-type", "InterNode", "--quant-type", "fp4_blockwise"], "goes with IntraNode and"),
    ],
)
def test_PK_2_what_cannot_be_done_is_said_before_any_rank_starts(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *options])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_an_op_that_cannot_be_made_ends_the_bench_with_its_reason(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MORI_FP8_COMBINE_SCALE_DIM", "60000")
    assert main([*QUICK, "--quant-type", "fp8_blockwise"]) == 2
    assert "MORI_FP8_COMBINE_SCALE_DIM=60000 is too large" in capfd.readouterr().err


def table(routing: str, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    return ids_for(routing, rank=1, world_size=4, tokens=tokens, topk=3, experts=16, seed=seed)


def test_routes_are_what_their_names_say() -> None:
    for routing in ("uniform", "zipf", "hot-rank"):
        ids = table(routing)
        assert bool(((ids >= 0) & (ids < 16)).all())
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert torch.equal(ids, table(routing))
        assert not torch.equal(ids, table(routing, seed=1))
    uniform, zipf = (
        torch.bincount(table(r).flatten(), minlength=16).sort().values for r in ("uniform", "zipf")
    )
    assert uniform[-1] < 1.6 * uniform[0]
    assert zipf[-1] > 4 * zipf[0]
    hot = table("hot-rank")
    assert (hot < 4).float().mean() > 0.5
    one = table("one-expert")
    assert bool((one[:, 0] == 0).all())
    assert bool((one[:, 1:] == -1).all())
    assert table("uniform", tokens=0).shape == (0, 3)


def test_routes_from_a_file_name_the_line_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("1 2 3\n4,5,-1\n\n6 7 8\n")
    assert table(str(file), tokens=4).tolist() == [[4, 5, -1], [6, 7, 8], [1, 2, 3], [4, 5, -1]]
    for line, words in (
        ("1 2", "3 ids from -1 to 15"),
        ("1 2 16", "from -1 to 15"),
        ("1 2 x", "whole numbers"),
    ):
        file.write_text(f"1 2 3\n{line}\n")
        with pytest.raises(ValueError, match=f"line 2.*{words}"):
            table(str(file))
