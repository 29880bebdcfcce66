"""Strict mode through the whole node (kernel, queue, engine, checker), one omission at a time."""

import pytest

STRICT = ("--coherence", "strict", "--schedule", "random")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_right_protocol_is_not_reported(program, examples, seed):
    outcome = program("handover.py", "right", options=(*STRICT, "--seed", str(seed)))
    assert outcome.code == 0, outcome.output
    assert "ok right" in outcome.output


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("left_out", "rule"), [("release", "a"), ("acquire", "b")])
def test_an_omission_is_reported_by_its_rule(program, examples, left_out, rule, seed):
    outcome = program("handover.py", left_out, options=(*STRICT, "--seed", str(seed)))
    assert outcome.code == 3, outcome.output
    assert f"rule {rule}" in outcome.output


@pytest.mark.parametrize("left_out", ["release", "acquire"])
def test_without_strict_mode_the_omission_goes_unseen(program, examples, left_out):
    """As on hardware on a good day: that is why strict mode exists."""
    outcome = program("handover.py", left_out)
    assert outcome.code == 0, outcome.output
