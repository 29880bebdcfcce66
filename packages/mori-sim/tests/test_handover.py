"""Strict mode through the whole node (kernel, queue, engine, checker), one omission at a time."""

import re

import pytest
from mori_sim import report

STRICT = ("--devices", "4", "--coherence", "strict", "--schedule", "random")
EXPECTED = {  # each on a device of its own; without the wait it depends on who came first
    "right": set(),
    "release": {"a"},
    "acquire": {"b"},
    "wait": {"a", "b", "order"},
}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_omission_is_reported_by_its_rule_and_the_right_protocol_is_not(
    program, examples, tmp_path, seed
):
    path = tmp_path / "report.jsonl"
    outcome = program("handover.py", *EXPECTED, options=(*STRICT, "--seed", str(seed), "--report", str(path)))
    assert outcome.code == 3, outcome.output
    assert "right" in outcome.ok()
    rules = {name: set() for name in EXPECTED}
    for entry in report.read(path).coherence:
        place = re.search(r"device (\d)", entry["text"])
        assert place, entry["text"]
        rules[list(EXPECTED)[int(place[1])]].add(entry["rule"])
    assert rules["wait"] & {"a", "order"}, outcome.output
    assert rules["wait"] <= EXPECTED["wait"]
    assert {**rules, "wait": EXPECTED["wait"]} == EXPECTED, outcome.output


def test_without_strict_mode_the_omissions_go_unseen(program, examples):
    """As on hardware on a good day: that is why strict mode exists."""
    outcome = program("handover.py", "release", "acquire", options=("--devices", "2"))
    assert outcome.code == 0, outcome.output
