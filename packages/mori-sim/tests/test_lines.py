"""Reports name the line of the kernel's source when it was compiled with line tables."""

from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "handover.py"


def test_a_broken_rule_names_the_source_line(program, examples):
    outcome = program(
        "handover.py",
        "release",
        options=("--coherence", "strict"),
        FLYDSL_DEBUG_ENABLE_DEBUG_INFO="1",
        FLYDSL_RUNTIME_ENABLE_CACHE="0",
    )
    lines = PROGRAM.read_text().splitlines()
    store = next(i for i, line in enumerate(lines, 1) if "pointer(fx.Int32, source, 16)" in line)
    assert outcome.code == 3
    assert f"(handover.py:{store})" in outcome.output, outcome.output
