"""mori-megamoe-bench: what it prints holds, its validation can fail, and what it cannot do it says before it
starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from mori_bench import Span, Trace
from mori_bench.faults import FAULTS
from mori_bench.result import results_in
from mori_megamoe.bench import routes
from mori_megamoe.bench.__main__ import main, parser
from mori_megamoe.bench.modes import MODES
from mori_megamoe.bench.overlap import Overlap
from mori_megamoe.bench.picture import svg
from mori_megamoe.bench.sizes import check_memory, memory_bytes, reps_for, sizes_from
from mori_megamoe.problem import Problem

ALL = [mode.name for mode in MODES.values() if mode.in_all]
SMALL = ["--world-size", "2", "--model-dim", "256", "--inter-dim", "256", "--experts", "4", "--topk", "2"]
QUICK = [*SMALL, "--tokens", "5", "--reps", "1", "--warmup", "0"]


def rows_of(out: str) -> list[dict[str, Any]]:
    return list(results_in(out.splitlines()))


def test_BE_2_all_modes_print_tables_a_picture_and_a_line_each(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "trace", "picture")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main([*SMALL, "--bs-list", "5,8", "--reps", "1", "--warmup", "0", *options]) == 0
    out = capfd.readouterr().out
    assert out.rstrip().endswith("validated")
    rows = rows_of(out)
    assert [(row["mode"], row["shape"]["tokens"]) for row in rows] == [(m, n) for n in (5, 8) for m in ALL]
    for row in rows:
        assert row["validated"] is True
        assert row["mismatched_rows"] == 0
        assert 0 < row["rel_l2"] < 0.1
        phases = row["phases_us"]
        assert row["bound_us"] == max(phases["puts"], phases["gemm1"])
        assert row["hideable_us"] >= min(phases["puts"], phases["gemm1"]) - 1e-3
        assert sum(row["sent_bytes"]) == sum(row["received_bytes"]) > 0
        assert sum(row["rows"]) == 2 * 2 * row["shape"]["tokens"]
    scales = {row["mode"]: row["settings"].get("scale_mode") for row in rows}
    few = ("ldsw", "ldsw", "ldsw")  # what "auto" is for so few tokens, and for what packs in the launch
    assert list(scales.values()) == [None, "shuffler", *few]
    by_mode = {row["mode"]: row["phases_us"].keys() for row in rows}
    common = {"prepare", "puts", "gemm1", "fused"}
    assert by_mode["baseline"] == common
    assert by_mode["shuffler"] == by_mode["ldsw"] == by_mode["in-launch"] == common | {"pack"}
    assert by_mode["fuse-quant"] == common | {"route", "qpack"}
    assert "no overlap of these two can be faster" in out
    assert "one launch of in-launch, rank 0" in out
    assert "us beyond the bound (" in out
    assert len(files["json"].read_text().splitlines()) == len(rows)
    names = {event["name"] for event in json.loads(files["trace"].read_text())["traceEvents"]}
    assert {"pack", "route", "qpack", "expert 0", "gemm1"} <= names
    assert "first expert starts" in files["picture"].read_text()


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_BE_1_a_broken_result_is_not_validated(fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--mode", "ldsw", "--break", fault]) == 1
    out = capfd.readouterr().out
    assert out.rstrip().endswith("NOT VALIDATED: see above")
    rows = rows_of(out)
    assert len(rows) == 2
    for row in rows:
        assert row["validated"] is False
        assert row["broken_on_purpose"] == fault
        assert row["mismatched_rows"] > 0


def test_the_trial_makes_four_calls_of_each_mode(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *SMALL, "--bs-list", "5,0"]) == 0
    out = capfd.readouterr().out
    assert out.count("  yes\n") == 2 * len(ALL)
    assert "RESULT_JSON" not in out
    assert main(["test", *SMALL, "--tokens", "5", "--mode", "ready-first,one-put"]) == 0
    assert capfd.readouterr().out.count("  yes\n") == 3  # the baseline always
    assert main(["test", *SMALL, "--tokens", "5", "--mode", "shuffler", "--break", "drop_peer"]) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--experts", "5"], "experts=5 on world_size=2"),
        (["--topk", "9"], "topk=9: 1 to 16 are possible, and no more than experts=4"),
        (["--model-dim", "300"], "model_dim=300: a multiple of 256 is needed"),
        (["--max-tokens", "12"], "max_tok_per_rank=12 is no power of two: the next larger one is 16"),
        (["--tokens", "9", "--max-tokens", "8"], "9 tokens and --max-tokens 8"),
        (["--tokens", "40000"], "max_tok_per_rank=65536: at most 32768"),
        (["--tokens", "4", "--bs-list", "4"], "--tokens and --bs-list: one or the other"),
        (["--shape", "flash"], "--shape flash and --model-dim"),
        (["--bs-list", "4,x"], "'x' is not a whole number"),
        (["--mode", "7001"], "--mode 7001: one of baseline, shuffler"),
        (["--mode", "ldsw,ldsw"], "each once"),
        (["--topk", "3", "--routing", "rank-balanced-hot"], "3 experts are on as many ranks, there are 2"),
        (["--hot-bias", "2"], "--hot-bias 2.0 with --routing uniform"),
        (["--hot-bias", "nan", "--routing", "hot-rank0"], "--hot-bias nan: a finite number"),
        (["--routing", "nowhere"], "invalid choice: 'nowhere'"),
        (["--tokens", "1", "--break", "swap_row_tiles"], "--break needs two tokens"),
        (["--tokens", "0", "--picture", "x.svg"], "without tokens there is nothing to draw"),
        (["--mode", "baseline", "--copy-delay-us", "5"], "--mode baseline, which has no queues"),
        (["--backend", "cuda"], "--backend cuda: this bench measures on the host target"),
        (["--json", "/nowhere/x"], "no folder /nowhere"),
    ],
)
def test_PK_2_what_cannot_be_done_is_said_before_any_rank_starts(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mori_megamoe.bench.__main__._run", lambda *_: pytest.fail("ranks would start"))
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *options])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("variable", ["MORI_MEGAMOE_PAIRS", "MORI_TIMEOUT_S", "MORI_SHMEM_BACKEND"])
@pytest.mark.parametrize("options", [["--backend", "host"], [], ["test"]])
def test_PK_2_a_variable_with_a_bad_value_is_one_line_before_any_rank_starts(
    variable: str,
    options: list[str],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mori_megamoe.bench.__main__._run", lambda *_: pytest.fail("ranks would start"))
    monkeypatch.setenv(variable, "x")
    assert main([*options, *QUICK]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"mori-megamoe-bench: {variable}='x' is refused: it takes ")


@pytest.mark.parametrize("option", ["--json", "--trace", "--picture", "--reps"])
def test_PK_2_what_only_a_measurement_has_is_refused_by_test(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["test", *SMALL, option, "7"])
    assert "`test`" in capsys.readouterr().err


def test_a_layer_that_does_not_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 1 kB\nMemAvailable: 2097152 kB\n")
    pro = Problem(7168, 3072, 384, 6, 8, 8192)
    with pytest.raises(ValueError, match=r"8 ranks of this layer need about \d+\.\d GiB, .* 2\.0 GiB free"):
        check_memory(pro, 5, str(meminfo))
    assert memory_bytes(pro, 5) > 8 * 48 * 3 * 7168 * 3072 / 2  # the codes of the weights alone
    check_memory(Problem(512, 256, 16, 4, 4, 32), 5, str(meminfo))


def test_shapes_and_repetitions_are_what_others_publish() -> None:
    args = parser().parse_args(["--shape", "v4_pro"])
    sizes = sizes_from(args, 8)
    p = sizes.problem
    assert (p.model_dim, p.inter_dim, p.num_experts, p.topk) == (7168, 3072, 384, 6)
    assert (sizes.bs_list, p.max_tokens, p.swiglu_limit) == ((2048, 4096, 8192), 8192, 10.0)
    assert reps_for(args) == 30
    assert reps_for(parser().parse_args(["--shape", "v4_pro", "--reps", "7"])) == 7
    assert reps_for(parser().parse_args([])) < 30
    assert "(default: 5, with --shape 30)" in " ".join(parser().format_help().split())


# ---- routes ----

PROBLEM = Problem(256, 256, 16, 3, 4, 512)


def ids_of(routing: str, bias: float | None = None, tokens: int = 400, seed: int = 0) -> torch.Tensor:
    bias = routes.check(routing, bias, PROBLEM)
    ids, weights = routes.slots_for(routing, PROBLEM, tokens, bias, routes.generator(seed, "test"))
    assert ids.dtype == torch.int32
    assert tuple(ids.shape) == tuple(weights.shape) == (tokens, 3)
    assert torch.allclose(weights.sum(1), torch.ones(tokens))
    return ids


@pytest.mark.parametrize("routing", routes.NAMES)
def test_a_tokens_experts_are_different_ones_and_follow_from_the_seed(routing: str) -> None:
    ids = ids_of(routing)
    assert bool(((ids >= 0) & (ids < 16)).all())
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert torch.equal(ids, ids_of(routing))
    assert not torch.equal(ids, ids_of(routing, seed=1))
    assert ids_of(routing, tokens=0).shape == (0, 3)


def test_routes_are_what_their_names_say() -> None:
    def share(ids: torch.Tensor, lowest: int, end: int) -> float:
        return ((ids >= lowest) & (ids < end)).float().mean().item()

    assert 0.2 < share(ids_of("uniform"), 0, 4) < 0.3
    assert share(ids_of("hot-rank0"), 0, 4) > 0.45
    assert share(ids_of("hot-rank0", 9.0), 0, 4) > 0.99
    assert share(ids_of("one-rank-idle"), 12, 16) == 0
    for name in ("rank-balanced-hot", "rank-balanced-last", "rank-mixed-skew"):
        assert all(len({i // 4 for i in row}) == 3 for row in ids_of(name).tolist())
    assert set((ids_of("rank-balanced-last") % 4).unique().tolist()) == {3}
    assert (ids_of("rank-balanced-hot", 1.0) % 4 == 0).all()
    assert (ids_of("rank-balanced-hot", 0.0) % 4 != 0).all()
    mixed = ids_of("rank-mixed-skew")
    assert torch.equal(mixed % 4 == 0, mixed < 8)
    with pytest.raises(ValueError, match="a probability, 0 to 1"):
        routes.check("rank-balanced-hot", 1.5, PROBLEM)
    with pytest.raises(ValueError, match="needs two experts on each rank"):
        routes.check("rank-balanced-hot", None, Problem(256, 256, 4, 2, 4, 8))
    with pytest.raises(ValueError, match="--topk 3 of the 2 experts elsewhere"):
        routes.check("one-rank-idle", None, Problem(256, 256, 4, 3, 2, 8))


# ---- what follows from times, and what is drawn of them ----


def test_overlap_hides_at_most_the_shorter_of_the_two() -> None:
    phases = {"prepare": 10.0, "pack": 30.0, "puts": 60.0, "gemm1": 100.0, "fused": 135.0}
    before = Overlap(150.0, phases)
    assert (before.serial_us, before.bound_us, before.limiter) == (200.0, 100.0, "gemm1")
    assert (before.hidden_us, before.hideable_us) == (50.0, 60.0)
    assert before.beyond == {"prepare": 10.0, "pack": 30.0, "not hidden": 10.0}
    within = Overlap(150.0, phases, packs_in_launch=True)
    assert within.hideable_us == 90.0
    long_wire = Overlap(150.0, {**phases, "puts": 120.0})
    assert (long_wire.bound_us, long_wire.limiter, long_wire.hideable_us) == (120.0, "puts", 100.0)


def test_a_picture_has_segments_and_tiles_where_they_were() -> None:
    trace = Trace(rank=1)
    trace.add("pack", "stage1", 0, 100)
    trace.add("segment 0, 3 rows", "landing from rank 0", 100, 200)
    trace.add("segment 2, 4 rows", "landing from rank 0", 200, 500)
    trace.add("expert 4", "workgroup 1", 250, 1000)
    trace.add("expert 5", "workgroup 1", 1000, 2000)
    trace.spans.append(Span(0, "workgroup 1", 0, 9000, "expert 0"))  # another rank's: no part of the scale
    drawn = svg(trace, rank=1, experts_per_rank=4, title="a <title>")
    assert "a &lt;title&gt;" in drawn
    assert [label for label in ("pair", "expert 4", "expert 5") if f">{label}</text>" in drawn] == [
        *("pair", "expert 4", "expert 5")
    ]
    assert ">expert 6</text>" not in drawn
    assert "segment 2, 4 rows, from rank 0" in drawn
    bars = {name: float(x) for x, name in re.findall(r'<rect x="([\d.]+)".*<title>(.*?)</title>', drawn)}
    assert bars["pack"] < bars["segment 0, 3 rows, from rank 0"] < bars["expert 4"] < bars["expert 5"]
    assert ">2 us</text>" in drawn
    with pytest.raises(ValueError, match="nothing of rank 3"):
        svg(trace, rank=3, experts_per_rank=4, title="")
