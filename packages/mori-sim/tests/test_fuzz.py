"""Whatever bytes arrive as packets or code: the process ends by itself, soon, well or with a clear fault."""

OPTIONS = ("--host-memory", "refuse")
QUIET = {"MORI_SIM_ON_FAULT": "error", "MORI_SIM_WATCHDOG_S": "1"}


def test_random_packets_end_in_a_fault_or_well(program):
    outcome = program("fuzz.py", "packets", 150, 1, options=OPTIONS, **QUIET)
    # `run` reports the faults (3); a signal or a hang in a trial makes the program itself fail (1).
    assert outcome.code == 3, outcome.output
    assert "'fault'" in outcome.output


def test_random_code_ends_in_a_fault_or_well(program, examples):
    outcome = program("fuzz.py", "code", 120, 1, examples.code_object("sum_slices"), options=OPTIONS, **QUIET)
    assert outcome.code == 3, outcome.output
    assert "'well'" in outcome.output
    assert "'fault'" in outcome.output
