"""`mori-gemm-ar-bench table`: every published line is measured, checked, and stands beside its figure."""

import json

import pytest
from mori_gemm_ar.bench import published
from mori_gemm_ar.bench.__main__ import main
from mori_gemm_ar.bench.tables import lines_of

SMALL = (
    "--backend",
    "host",
    "--world-size",
    "2",
    "--reps",
    "1",
    "--warmup",
    "0",
    "-m",
    "64",
    "-n",
    "256",
    "-k",
    "128",
)
MEASURED = [table for table in published.TABLES if table != "granularity"]


@pytest.mark.parametrize("table", MEASURED)
def test_every_line_is_measured_and_validated(table, tmp_path, capfd):
    results = tmp_path / "results.jsonl"
    assert main(["table", table, *SMALL, "--json", str(results)]) == 0
    output = capfd.readouterr().out
    for line in lines_of(table):
        rows = [row for row in output.splitlines() if row.startswith(f"{line.name} ")]
        assert any(str(line.published_us) in row.split() and row.rstrip().endswith("yes") for row in rows), (
            line,
            rows,
        )
    assert "compare no two of them" in output
    assert output.rstrip().endswith("validated")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == len(lines_of(table))
    assert all(result["validated"] for result in found)


def test_phases_stand_side_by_side(capfd):
    main(["table", "phases", *SMALL])
    output = capfd.readouterr().out
    for phase, times in published.PHASES.items():
        row = next(row for row in output.splitlines() if row.startswith(f"{phase} "))
        for us in times:
            assert us is None or str(us) in row


def test_granularity_is_reproduced_to_three_digits(capfd):
    assert main(["table", "granularity"]) == 0
    output = capfd.readouterr().out
    for columns, rel_l2 in published.GRANULARITY.items():
        row = next(row for row in output.splitlines() if row.split()[:1] == [str(columns)])
        assert float(row.split()[2]) == pytest.approx(rel_l2, abs=1.5e-5)


def test_a_wrong_result_is_not_validated(capfd):
    assert main(["table", "headline", *SMALL, "--break", "swap_columns"]) == 1
    assert "NOT VALIDATED" in capfd.readouterr().out


@pytest.mark.parametrize("arguments", [["table"], ["table", "fastest"], ["run", "headline"]])
def test_a_table_has_a_name_and_nothing_else_has(arguments, capfd):
    with pytest.raises(SystemExit):
        main(arguments)
    assert "table" in capfd.readouterr().err
