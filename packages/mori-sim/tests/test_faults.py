"""A fault says what happened where, and no process that had one ends in success."""

import json

import pytest

ABORTED = 128 + 6
KERNEL_FAULTS = {
    "wild_load": ("sum_slices", 700, "sum_slices_0", "0x12345"),
    "past_the_end": ("sum_slices", 700, "global_store"),
    "reserved_only": ("sum_slices", 700, "global_store", "reserved"),
    "peer_not_enabled": ("sum_slices", 700, "hipDeviceEnablePeerAccess"),
    "large_block": ("sum_slices", 9, "2048 work items"),
}
PACKET_FAULTS = {
    "bad_packet": ("unknown_op", "00000077"),
    "packet_out_of_range": ("COPY_LINEAR", "out_of_range", "bytes past the end of the allocation"),
    "doorbell_backwards": ("bad_pointer", "doorbell 3"),
    "doorbell_ahead": ("bad_pointer", "write pointer 0, doorbell 32"),
}


@pytest.mark.parametrize("kind", KERNEL_FAULTS)
def test_a_kernel_fault_aborts_with_its_story(program, examples, kind):
    kernel, _, *words = KERNEL_FAULTS[kind]
    outcome = program("faults.py", kind, examples.code_object(kernel), options=("--devices", "2"))
    assert outcome.code == ABORTED, outcome.output
    assert "returned" not in outcome.output
    for word in words:
        assert word in outcome.output


@pytest.mark.parametrize("kind", KERNEL_FAULTS)
def test_a_kernel_fault_can_be_a_sticky_error_instead(program, examples, kind):
    kernel, code, *_ = KERNEL_FAULTS[kind]
    outcome = program(
        "faults.py", kind, examples.code_object(kernel), options=("--devices", "2"), MORI_SIM_ON_FAULT="error"
    )
    assert f"returned {code}" in outcome.output
    assert outcome.code == 70, outcome.output


@pytest.mark.parametrize("kind", PACKET_FAULTS)
def test_a_bad_packet_aborts_with_its_dwords(program, kind):
    outcome = program("faults.py", kind)
    assert outcome.code == ABORTED, outcome.output
    for word in PACKET_FAULTS[kind]:
        assert word in outcome.output


def test_a_launch_without_a_descriptor_left_is_an_error_of_that_call(program, examples):
    outcome = program("faults.py", "no_descriptors", examples.code_object("sum_slices"))
    assert outcome.code == 0, outcome.output  # hipErrorOutOfMemory, and nothing final
    assert "returned 2" in outcome.output
    assert "Too many open files: this process may hold" in outcome.output
    assert "came 80418041" in outcome.output  # 8 x 2.0, also with none left once the node has what it needs


def test_a_stuck_kernel_is_described(program, examples, tmp_path):
    report = tmp_path / "report.jsonl"
    outcome = program(
        "faults.py",
        "stuck",
        examples.code_object("await_flags"),
        options=("--report", str(report)),
        MORI_SIM_WATCHDOG_S="1",
        MORI_SIM_ON_FAULT="error",
    )
    assert "returned 702" in outcome.output
    assert outcome.code == 70
    entries = [json.loads(line) for line in report.read_text().splitlines()]
    story = next(e["text"] for e in entries if e["kind"] == "fault")
    assert "await_flags_0" in story
    assert "polls 0x" in story
    assert "saw 0x0" in story  # the flag's value, which should have been 41


def test_ordinary_memory_can_be_refused(program, examples):
    text = f"""
import ctypes, faults, hip
ordinary = ctypes.create_string_buffer(8192)
code = faults.Path({str(examples.code_object("sum_slices"))!r})
faults.sum_slices(code, ctypes.addressof(ordinary), 512, hip.malloc(512), 32)
"""
    assert program("-c", text).code == 0
    outcome = program("-c", text, options=("--host-memory", "refuse"))
    assert outcome.code == ABORTED, outcome.output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MORI_SIM_DEVICES", "9"),
        ("MORI_SIM_COPY_DELAY_US", "soon"),
        ("MORI_SIM_MFMA_ORDER", "fast"),
        ("MORI_SIM_KERNEL_END", "never"),
    ],
)
def test_a_bad_setting_is_named(program, name, value):
    # MORI_SIM_DEVICES is set by `run` itself, so it is set again below it.
    code = f"import os; os.environ[{name!r}] = {value!r}; import hip; print(hip.code_of('hipInit', 0))"
    outcome = program("-c", code)
    assert f"{name}={value}: allowed:" in outcome.output
    assert "\n1\n" in "\n" + outcome.output
