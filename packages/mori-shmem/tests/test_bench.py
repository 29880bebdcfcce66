"""mori-shmem-bench: every row is there and checked, and the check can fail."""

import json
import pathlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import mori_bench
import pytest
from mori_bench import Result, Timing
from mori_bench.faults import FAULTS
from mori_shmem.bench.__main__ import main
from mori_shmem.bench.put import SIZES
from mori_shmem.bench.targets import targets
from mori_shmem.launch import client

Bench = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def bench(capfd: pytest.CaptureFixture[str]) -> Bench:
    """Runs the console script's main in this process, whose server has torch imported already."""

    def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        code = main(["--reps", "1", "--warmup", "0", "--max-bytes", str(1 << 20), *arguments])
        out, err = capfd.readouterr()
        return code, mori_bench.results_in(out.splitlines()), out + err

    return run


def test_every_part_is_measured_and_validated(bench: Bench, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "rows.jsonl"
    code, rows, output = bench("--world-size", "3", "--json", str(file))
    assert code == 0, output
    assert [json.loads(line) for line in file.read_text().splitlines()] == rows
    modes = {
        "put": {"shmem", "pipelined", "memcpy", "gloo"},
        "put_signal": {"shmem", "gloo"},
        "signal_round_trip": {"shmem", "gloo"},
        "barrier": {"shmem", "gloo"},
        "all_reduce": {"shmem", "gloo"},
    }
    assert {(row["op"], row["mode"]) for row in rows} == {(op, mode) for op in modes for mode in modes[op]}
    for row in rows:
        assert mori_bench.problems(row) == []
        assert row["validated"] is True
        assert row["world_size"] == 3
        assert row["settings"]["MORI_SHMEM_QUEUES"] == 8
    assert {row["shape"]["bytes"] for row in rows if row["op"] == "put"} == {s for s in SIZES if s <= 1 << 20}
    assert {8, 1 << 20, 64 << 20} <= set(SIZES)
    assert output.count("not measured in this run") == 2  # the targets for 2 and for 4 ranks
    assert "put >= 80%" in output


@pytest.mark.parametrize("fault", FAULTS)
def test_BE_1_a_broken_result_is_never_validated(bench: Bench, fault: str) -> None:
    parts = ("--part", "latency", "--part", "barrier", "--part", "all_reduce")
    code, rows, output = bench("--world-size", "2", *parts, "--break", fault)
    assert code == 1, output
    assert len(rows) == 8
    assert [row for row in rows if row["validated"]] == []


def test_BE_1_neither_is_a_broken_put(bench: Bench) -> None:
    code, rows, output = bench("--world-size", "2", "--part", "put", "--break", "swap_columns")
    assert code == 1, output
    assert len(rows) == 4 * 7
    assert [row for row in rows if row["validated"]] == []


def test_what_it_cannot_do_is_refused(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench("--world-size", "2", "--trace", "x.json")
    assert "no phases to trace" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ((), {"MORI_TIMEOUT_S": "-1"}, "MORI_TIMEOUT_S='-1' is refused: it takes a number from 0.01"),
        ((), {"MORI_SHMEM_RING_BYTES": "abc"}, "MORI_SHMEM_RING_BYTES='abc' is refused"),
        (("--world-size", "99999"), {}, "world_size=99999: run_ranks starts 1 to 1024 ranks"),
        (("--backend", "host", "--part", "pairs"), {}, "--part pairs: on the host backend there are put"),
    ],
)
def test_the_command_refuses_in_one_line_before_it_starts_ranks(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    said: str,
) -> None:
    monkeypatch.setattr(client._server, "request_run", lambda connection: pytest.fail("ranks were started"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, output = bench(*arguments)
    assert code == 2
    lines = [line for line in output.splitlines() if not line.endswith("...")]  # what it was about to run
    assert len(lines) == 1
    assert lines[0].startswith(f"mori-shmem-bench: error: {said}")


def test_the_console_script_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="mori-shmem-bench")
    assert script.load() is main


# ---- the targets, on made-up results ----


def _results(factor: float = 1.0, *, validated: bool = True) -> list[Result]:
    """What meets the targets narrowly; shmem takes `factor` times as long."""
    sixteen_mib = {"rows": 1024, "columns": 8192}

    def result(op: str, mode: str, world_size: int, shape: dict[str, int], took_us: float) -> Result:
        took_us *= factor if mode == "shmem" else 1.0
        timing = Timing(took_us, took_us, took_us, 1.0, took_us, took_us, took_us)
        return Result(op, "host", "cpu", world_size, mode, shape, {}, timing, validated, mismatched_rows=0)

    return [
        result("put", "memcpy", 2, {"bytes": 1 << 20}, 80.0),
        result("put", "shmem", 2, {"bytes": 1 << 20}, 99.0),
        result("put", "memcpy", 2, {"bytes": 4096}, 1.0),
        result("put", "shmem", 2, {"bytes": 4096}, 9.0),  # small: not what the target is about
        result("put_signal", "shmem", 2, {"bytes": 8}, 19.0),
        result("all_reduce", "shmem", 4, sixteen_mib, 10.0),
        result("all_reduce", "gloo", 4, sixteen_mib, 31.0),
    ]


def test_targets_are_met_only_by_validated_results_of_this_run() -> None:
    assert [target.met for target in targets(_results())] == [True, True, True]
    assert [target.met for target in targets(_results(1.3))] == [False, False, False]
    assert [target.met for target in targets(_results(validated=False))] == [False, False, False]
    assert [target.met for target in targets([])] == [None, None, None]
    assert str(targets(_results())[1]).endswith("19.0 us, met")
