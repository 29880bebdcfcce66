"""Queues that are asked for through ROCr's public call."""


def test_rocr_hands_out_queues_that_copy(program):
    outcome = program("rocr.py", options=("--devices", "8"))
    assert outcome.code == 0, outcome.output
    assert "rocr works: HSA_STATUS_ERROR_OUT_OF_RESOURCES" in outcome.output
