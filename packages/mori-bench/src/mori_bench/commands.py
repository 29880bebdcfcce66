"""Runs a bench as a child process: with a time limit, in its own process group, and never left behind.

Output goes to unnamed temporary files, so that nothing can fill a pipe and block. When the limit is reached
or the user interrupts, the whole group gets SIGINT, has GRACE_S to end itself, and is then killed. If *this*
process is killed, the kernel sends the child SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from mori_bench.rows import Row, rows_in

GRACE_S = 5.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """What a command did. `cause` says in one line why it failed; None if it did not."""

    command: tuple[str, ...]
    rows: list[Row]
    seconds: float
    cause: str | None


def run_command(command: Sequence[str], limit_s: float | None = None) -> Outcome:
    """Run to its end and read its rows. It succeeds if it exits with 0 and every row is validated."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_end_with_parent(),
            )
        except OSError as error:
            hint = f" (write: env {command[0]} ...)" if "=" in command[0] else ""
            return Outcome(tuple(command), [], 0.0, f"cannot start {command[0]}: {error.strerror}{hint}")
        try:
            code = child.wait(limit_s)
            cause = _cause_of_exit(code, _last_line(err))
        except subprocess.TimeoutExpired:
            cause = f"still running after its limit of {limit_s:g} s"
        finally:
            _end_group(child)
        out.seek(0)
        found = rows_in(out.read().decode(errors="replace").splitlines(), "its output")
    cause = cause or (found.complaints[0] if found.complaints else None) or _cause_of_rows(found.rows)
    return Outcome(tuple(command), found.rows, time.monotonic() - began, cause)


def _end_with_parent() -> Callable[[], None]:
    """For the child, between fork and exec: end when the parent dies, also if it has died already."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def prepare() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Interrupt what is left of the child's process group, then kill it."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _cause_of_exit(code: int, last_line: str) -> str | None:
    if code == 0:
        return None
    if code < 0:
        return f"ended by {signal.Signals(-code).name}" + (f": {last_line}" if last_line else "")
    return f"exit code {code}: {last_line or 'nothing on stderr'}"


def _cause_of_rows(rows: list[Row]) -> str | None:
    if not rows:
        return "it printed no RESULT_JSON line"
    wrong = [row for row in rows if row.get("validated") is not True]
    return f"{len(wrong)} of {len(rows)} results not validated" if wrong else None


def _last_line(err: IO[bytes]) -> str:
    """The last line of stderr that says something."""
    err.seek(0, os.SEEK_END)
    err.seek(max(0, err.tell() - 4096))
    lines = [line.strip() for line in err.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
