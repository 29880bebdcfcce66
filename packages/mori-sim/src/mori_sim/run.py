"""`mori-sim run`: a program in the simulated node's environment; no fault slips past the exit code.

The exit code is the program's own if that is not 0; 3 if the program ended well but a fault or a broken rule
of the memory model was reported, by whichever of its processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from mori_sim import report
from mori_sim.environment import program_environment

EXIT_REPORTED = 3


def run(
    command: list[str], settings: dict[str, str], report_file: Path | None, *, show_counters: bool = False
) -> int:
    """Runs the command to its end, prints what was found to stderr, and returns the exit code."""
    with report.unnamed_file() as unnamed:
        path = report_file.resolve() if report_file else unnamed
        path.write_text("")
        env = program_environment(dict(os.environ), settings | {"MORI_SIM_REPORT": str(path)})
        code = wait_for(subprocess.Popen(command, env=env))
        found = report.read(path)
    if not found.clean:
        print(f"\nmori-sim: {len(found.faults)} faults, {len(found.coherence)} broken rules", file=sys.stderr)
        print(report.findings(found), file=sys.stderr)
    if show_counters:
        print(report.cost_sheet(found), file=sys.stderr)
    if code == 0 and not found.clean:
        return EXIT_REPORTED
    return code


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """The exit code as a shell would give it; a request to end is passed on to the program."""

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # the terminal sends it to the program, too
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
