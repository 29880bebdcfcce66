"""Strict mode through the whole node (kernel, queue, engine, checker), one omission at a time."""

import re
from pathlib import Path

import pytest
from mori_sim import report

PROGRAM = Path(__file__).parent / "programs" / "handover.py"
STRICT = ("--devices", "4", "--coherence", "strict", "--schedule", "random")
EXPECTED = {  # each on a device of its own; without the wait it depends on who came first
    "right": set(),
    "release": {"a"},
    "acquire": {"b"},
    "wait": {"a", "b", "order"},
}


LINES = {"FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "1", "FLYDSL_RUNTIME_ENABLE_CACHE": "0"}


@pytest.fixture(scope="module", params=[1, 2])
def strict_run(request, program, examples, tmp_path_factory):
    """The process's outcome and, for each name, what was reported; the kernels have line tables."""
    path = tmp_path_factory.mktemp("handover") / "report.jsonl"
    options = (*STRICT, "--seed", str(request.param), "--report", str(path))
    outcome = program("handover.py", *EXPECTED, options=options, **LINES)
    told = {name: [] for name in EXPECTED}
    for entry in report.read(path).coherence:
        place = re.search(r"device (\d)", entry["text"])
        assert place, entry["text"]
        told[list(EXPECTED)[int(place[1])]].append(entry)
    return outcome, told


def test_each_omission_is_reported_by_its_rule_and_the_right_protocol_is_not(strict_run):
    outcome, told = strict_run
    assert outcome.code == 3, outcome.output
    assert "right" in outcome.ok()
    rules = {name: {entry["rule"] for entry in entries} for name, entries in told.items()}
    assert rules["wait"] & {"a", "order"}, outcome.output
    assert rules["wait"] <= EXPECTED["wait"]
    assert {**rules, "wait": EXPECTED["wait"]} == EXPECTED, outcome.output


def test_a_broken_rule_names_the_source_line(strict_run):
    lines = PROGRAM.read_text().splitlines()
    store = next(i for i, line in enumerate(lines, 1) if "pointer(fx.Int32, source, 16)" in line)
    assert any(f"(handover.py:{store})" in entry["text"] for entry in strict_run[1]["release"])


def test_without_strict_mode_the_omissions_go_unseen(program, examples):
    """As on hardware on a good day: that is why strict mode exists."""
    outcome = program("handover.py", "release", "acquire", options=("--devices", "2"))
    assert outcome.code == 0, outcome.output
