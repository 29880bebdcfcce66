"""Measurements that can be believed: interleaved, checked, with their spread. See docs/measuring.md."""

from mori_bench import faults
from mori_bench.environment import commit_of, cpu_name, launched, versions
from mori_bench.faults import Fault
from mori_bench.memory import free_bytes
from mori_bench.options import add_common_options, seed_for, world_size_of
from mori_bench.protocol import Case, Timing, measure
from mori_bench.result import Result, check_row, problems, results_in
from mori_bench.tables import table
from mori_bench.trace import Span, Trace
from mori_bench.verdicts import Verdict, verdict

__all__ = [
    "Case",
    "Fault",
    "Result",
    "Span",
    "Timing",
    "Trace",
    "Verdict",
    "add_common_options",
    "check_row",
    "commit_of",
    "cpu_name",
    "faults",
    "free_bytes",
    "launched",
    "measure",
    "problems",
    "results_in",
    "seed_for",
    "table",
    "verdict",
    "versions",
    "world_size_of",
]
