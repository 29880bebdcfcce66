"""A rank: take over the caller's surroundings, call fn, report what came of it, end like any Python process.

It runs in a process forked from the supervisor; the modules that the server has imported are there already.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import traceback

from mori_shmem.errors import PeerError
from mori_shmem.launch import wire
from mori_shmem.launch.messages import Job, Raised, Report, Returned
from mori_shmem.launch.pickling import dumps, loads

_PR_SET_PDEATHSIG = 1


def main(job: Job, rank: int, port: int, report_fd: int, stack_fd: int) -> None:
    """The life of a rank; ends the process."""
    _die_with_supervisor()
    faulthandler.enable(file=stack_fd)
    faulthandler.register(signal.SIGUSR1, file=stack_fd)
    _take_over(job, rank, port)
    report, exit_code = _call(job, rank)
    with os.fdopen(report_fd, "wb") as pipe, contextlib.suppress(BrokenPipeError):
        pipe.write(wire.encode(report))
    _leave(exit_code)


def _die_with_supervisor() -> None:
    supervisor = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)


def _take_over(job: Job, rank: int, port: int) -> None:
    """The caller's directory, path and variables, and torchrun's variables on top."""
    os.chdir(job.cwd)
    sys.path[:] = job.sys_path
    sys.argv[:] = job.argv
    os.environ.clear()
    os.environ.update({"OMP_NUM_THREADS": "1", **job.environ, **_torchrun_variables(job, rank, port)})
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)  # whole lines, so that ranks do not mix
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    import torch

    with contextlib.suppress(ValueError):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))


def _torchrun_variables(job: Job, rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(job.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"run_ranks-{port}",
    }


def _call(job: Job, rank: int) -> tuple[Report, int]:
    try:
        fn, args = loads(job.call)
        return Returned(rank, dumps(fn(*args))), 0
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return Returned(rank, dumps(None)), 0
        text = "".join(traceback.format_exception(error))
        return Raised(rank, _travelling(error), text, isinstance(error, PeerError)), 1


def _travelling(error: BaseException) -> bytes | None:
    """The pickled exception, if what comes out of the pickle is the same again."""
    with contextlib.suppress(Exception):
        data = dumps(error)
        again = loads(data)
        if type(again) is type(error) and str(again) == str(error) and not isinstance(again, SystemExit):
            return data
    return None


def _leave(exit_code: int) -> None:
    """What the interpreter does at its end, short of tearing torch down module by module (0.2 s a rank)."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        exit_code = exit_code or 1
    os._exit(exit_code)
