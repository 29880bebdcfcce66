"""Kernels that FlyDSL compiles and launches in its normal way give exact results on the simulated node."""

import pytest

NAMES = (
    "quantise",
    "sum_slices",
    "push",
    "push_set",
    "wait_for_host",
    "wait_for_kernel",
    "post",
    "matmul_wide",
    "matmul_narrow",
    "matmul_tracked",
    "matmul_async",
    "matmul_mixed",
    "matmul_mixed_atom",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_is_exact(examples, name):
    assert name in examples.outcome.ok(), examples.outcome.output


def test_the_run_ends_well(examples):
    assert examples.outcome.code == 0, examples.outcome.output


def test_all_kernels_are_exact_and_unreported_in_strict_mode(program, examples):
    options = ("--devices", "8", "--coherence", "strict", "--schedule", "random", "--seed", "7")
    outcome = program("examples.py", options=options, timeout_s=200)
    assert outcome.ok() == set(NAMES), outcome.output
    assert outcome.code == 0, outcome.output
