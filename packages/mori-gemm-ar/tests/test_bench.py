"""The bench: rows that say what ran, checks that can fail, options that are honoured or refused."""

import json

import pytest
import torch
from mori_bench import check_row, results_in
from mori_bench.faults import FAULTS
from mori_gemm_ar.bench import limits
from mori_gemm_ar.bench.__main__ import main, parser
from mori_gemm_ar.bench.cases import cases_from
from mori_gemm_ar.bench.report import overlap
from mori_gemm_ar.plan import Phase
from mori_shmem.errors import ArgumentError, UnsupportedShape
from mori_shmem.launch import client

SMALL = ["--world-size", "2", "-m", "150", "-n", "192", "-k", "256", "--reps", "2", "--warmup", "0"]


@pytest.fixture
def bench(capfd):
    """Run the command; (exit status, rows, all text)."""

    def run(*argv):
        capfd.readouterr()
        status = main([*SMALL, *argv])
        text = capfd.readouterr().out
        return status, results_in(text.splitlines()), text

    return run


def test_BE_2_one_row_per_case_says_exactly_what_ran(bench, tmp_path):
    status, rows, text = bench("--json", str(tmp_path / "rows"), "--trace", str(tmp_path / "trace"))
    assert status == 0
    assert text.splitlines()[-1] == "validated"
    assert [(row["mode"], row["dtype"]["gather"], row["settings"]["gather_transport"]) for row in rows] == [
        ("gemm-only", "none", None),
        ("split-sdma", "bf16", "sdma"),
        ("fused-sdma", "bf16", "sdma"),
        ("split-lsa", "bf16", "lsa"),
        ("fused-lsa", "bf16", "lsa"),
        ("fused-sdma", "fp8", "sdma"),
        ("fused-sdma", "fp8", "lsa"),
    ]
    for row in rows:
        check_row(row)
        assert row["validated"]
        assert row["shape"] == {"m": 150, "n": 192, "k": 256}
        assert row["world_size"] == 2
        assert row["backend"] == "host"
        assert row["max_rank_time_us"] > 0
        assert row["settings"]["quant"] == row["dtype"]["quant"] == "blockscale"
        assert row["settings"]["fallback"] is False
        assert row["same_bits_on_all_ranks"]
        assert isinstance(row["window_bytes"], int)
        assert row["versions"]["mori-gemm-ar"]
        assert row["versions"]["torch"]
        assert set(row["phases_us"]) <= set(Phase)
    assert abs(rows[1]["rel_l2"] - 2.2e-3) < 3e-4
    assert abs(rows[5]["rel_l2"] - 2.6e-2) < 2e-3
    assert rows[5]["rel_l2"] == rows[6]["rel_l2"]
    assert "gather" not in rows[3]["phases_us"]
    assert len((tmp_path / "rows").read_text().splitlines()) == 7
    assert json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert "bf16 wire: bit for bit the same in 4 cases" in text
    assert "fp8 wire: bit for bit the same in 2 cases" in text


@pytest.mark.parametrize("fault", FAULTS)
def test_BE_1_validated_is_false_for_every_case_of_a_broken_run(bench, fault):
    status, rows, text = bench("--break", fault, "--reps", "1")
    assert status == 1
    assert len(rows) == 7
    assert [row["mode"] for row in rows if row["validated"]] == []
    assert text.splitlines()[-1].startswith("NOT VALIDATED")


def test_options_reach_the_op_and_the_row(bench):
    status, (row,), _ = bench(
        *("--mode", "fused-sdma", "--quant", "mxfp8", "--gather-dtype", "fp8", "--gather-transport", "sdma"),
        *("--fuse-quantize", "--fuse-reduce-push", "--gather-bands", "3", "--publish", "fence"),
        *("--chunks", "1", "--sdma-queues", "2"),
    )
    assert status == 0
    assert row["dtype"] == {
        "input": "fp8_e4m3fn",
        "quant": "mxfp8",
        "scatter": "bf16",
        "gather": "fp8",
        "output": "bf16",
    }
    settings = row["settings"]
    assert (settings["gather_bands"], settings["publish"], settings["sdma_queues"]) == (3, "fence", 2)
    assert (settings["chunks"], settings["puts_per_slice"], settings["parts_per_slice"]) == (1, 1, 3)
    assert settings["pull_blocks"] is None


def test_one_call_is_drawn_with_its_copies_and_their_share_within_the_gemm(bench):
    status, (row,), text = bench("--mode", "fused-sdma", "-m", "1000", "--chunks", "4")
    assert status == 0
    assert row["settings"]["puts_per_slice"] == 4
    assert 0 <= row["copies_within_gemm_pct"] <= 100
    assert "copies to 1" in text
    assert "of the time in which chunks were copied lies within the gemm" in text
    status, (row,), _ = bench("--mode", "split-sdma", "-m", "1000")
    assert row["copies_within_gemm_pct"] == 0


def test_the_unfused_baseline_is_measured_in_turns(bench):
    status, rows, text = bench("--mode", "fused-lsa", "--compare", "unfused", "--reps", "5")
    assert status == 0
    assert [row["mode"] for row in rows] == ["fused-lsa", "unfused"]
    assert rows[1]["validated"]
    assert "fused-lsa bf16 lsa against unfused: " in text


def test_one_rank_and_no_rows(bench):
    status, rows, _ = bench("--world-size", "1", "--mode", "all")
    assert status == 0
    assert len(rows) == 7
    status, rows, _ = bench("-m", "0", "--mode", "split-lsa")
    assert (status, rows[0]["rel_l2"]) == (0, 0.0)


def parsed(*argv):
    return cases_from(parser().parse_args(argv))


def test_PK_2_options_that_a_mode_would_ignore_are_refused(capsys):
    with pytest.raises(ArgumentError, match=r"chunks=4 has no effect"):
        parsed("--mode", "split-lsa", "--chunks", "4")
    assert main(["--mode", "gemm-only", "--gather-dtype", "fp8"]) == 2
    assert "gemm-only does not communicate" in capsys.readouterr().err
    with pytest.raises(ArgumentError, match=r"publish: no mode can honour this"):
        parsed("--publish", "fence")


@pytest.mark.parametrize(
    ("argv", "variables", "said"),
    [
        (["-n", "999999999"], {}, "-m 1024 -n 999999999 -k 768: 8 ranks of this machine and their float64"),
        (["-k", "999999999", "--mode", "fused-lsa"], {}, "-m 1024 -n 1536 -k 999999999: 8 ranks"),
        (["-m", "999999999"], {}, "m_max=999999999: from 1 to"),
        (["-m", "16777215", "-n", "1048576", "-k", "128"], {}, "-m 16777215 -n 1048576 -k 128: 8 ranks"),
        (["-n", "9999999999999999"], {}, "n=9999999999999999, m_max=1024 on 8 ranks need a window of"),
        (["accuracy", "-k", "999999999"], {}, "-k 999999999: 1 rank of this machine"),
        (["accuracy", "-k", "-1"], {}, "-k -1: at least 1"),
        (["table", "headline", "-n", "999999936"], {}, "-m 1 -n 999999936 -k 256: 8 ranks"),
        ([], {"MORI_TIMEOUT_S": "-1"}, "MORI_TIMEOUT_S='-1' is refused: it takes a number from 0.01"),
        ([], {"MORI_GEMM_AR_PULL_BLOCKS": "abc"}, "MORI_GEMM_AR_PULL_BLOCKS='abc' is refused"),
        (["table", "headline"], {"MORI_SHMEM_QUEUES": "0"}, "MORI_SHMEM_QUEUES='0' is refused"),
    ],
)
def test_the_command_refuses_in_one_line_before_it_starts_ranks(argv, variables, said, monkeypatch, capfd):
    monkeypatch.setattr(client._server, "request_run", lambda connection: pytest.fail("ranks were started"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*argv, "--backend", "host"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"mori-gemm-ar-bench: error: {said}"), line


def test_memory_is_enough_or_both_numbers_are_named(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1024 kB\n")
    limits.check_memory(1 << 20, "-m 1", 2, str(tmp_path / "meminfo"))
    with pytest.raises(UnsupportedShape, match=r"-m 1: 2 ranks .* need at least 0.0 GiB, 0.0 GiB are free"):
        limits.check_memory((1 << 20) + 1, "-m 1", 2, str(tmp_path / "meminfo"))


def test_all_modes_take_the_options_that_mean_something_to_them():
    cases = parsed("--chunks", "2", "--gather-dtype", "fp8", "--pull-blocks", "8")
    assert [case.options.mode for case in cases] == [
        "gemm-only",
        "split-sdma",
        "fused-sdma",
        "split-lsa",
        "fused-lsa",
    ]
    assert [case.options.chunks for case in cases] == [None, None, 2, None, None]
    assert [case.options.gather_dtype for case in cases] == [None, "fp8", "fp8", "fp8", "fp8"]
    assert [case.options.pull_blocks for case in cases] == [None, 8, 8, 8, 8]
    cases = parsed("--fuse-reduce-push", "--gather-bands", "2")
    assert [case.options.gather_bands for case in cases] == [None, 2, 2, None, None]
    assert len({case.label for case in parsed()}) == 7


def test_accuracy_prints_both_tables(capsys):
    assert main(["accuracy", "-k", "2048"]) == 0
    text = capsys.readouterr().out
    rows = [line.split() for line in text.splitlines() if line[:8].strip().isdigit()]
    assert [(row[0], row[2]) for row in rows] == [
        ("7168", "8192"),
        ("512", "114688"),
        ("256", "229376"),
        ("128", "458752"),
        ("32", "1835008"),
    ]
    for row, published in zip(rows, (2.646e-2, 2.631e-2, 2.609e-2, 2.572e-2, 2.399e-2), strict=True):
        assert abs(float(row[1]) - published) < 2e-5
    assert "0.06 %" in text
    assert "12.50 %" in text
    lines = [line.split() for line in text.splitlines() if line.startswith(("bf16", "fp8"))]
    assert abs(float(lines[0][1]) - 2.35e-3) < 5e-5
    assert abs(float(lines[1][1]) - 2.6e-2) < 2e-3


@pytest.mark.skipif(torch.version.hip is not None, reason="this machine may have that backend")
def test_a_backend_that_is_not_here_is_an_error_and_not_another_backend(capfd):
    assert main(["--backend", "rocm", "--world-size", "1"]) == 2
    assert "TransportInert" in capfd.readouterr().err


def test_overlap_is_the_share_of_copying_within_the_gemm():
    from mori_bench import Span

    spans = [Span(0, "phase", 0, 100, "gemm"), Span(0, "copies to 1", 90, 110, "chunk")]
    assert overlap(spans) == 50
    assert overlap(spans[:1]) is None
