"""The process that has torch imported and forks one supervisor per run. It has one thread and no state.

It ends when the caller's end of the control connection closes, after its supervisors have ended their ranks.
A module that starts threads when it is imported here ends its usefulness: every request is then refused.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Sequence

from mori_shmem import descriptors
from mori_shmem.errors import ArgumentError
from mori_shmem.launch import supervisor, wire
from mori_shmem.launch.messages import Refused

_FAREWELL_S = 5.0  # a supervisor needs at most 2 s to end its ranks


def serve(control_fd: int, modules: Sequence[str] = ()) -> None:
    """Fork a supervisor for each request, until the caller is gone."""
    refusal = _preload(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=control_fd) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 16, 3)
            _reap()
            if not data:
                break
            said = refusal if len(fds) == 3 else _too_few(fds)
            if said is not None and fds:
                with contextlib.suppress(ConnectionError), socket.socket(fileno=fds.pop(0)) as caller:
                    caller.sendall(wire.encode(said))
            elif said is None and os.fork() == 0:
                control.close()
                supervisor.main(*fds)  # does not return
            for fd in fds:
                os.close(fd)
    deadline = time.monotonic() + _FAREWELL_S
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.01)


def _preload(modules: Sequence[str]) -> Refused | None:
    """Import once what every rank needs; the forked ranks share the pages. What is wrong with a module."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import cloudpickle  # type: ignore[import-untyped]  # noqa: F401
        import torch.distributed  # noqa: F401

        with contextlib.suppress(Exception):  # a broken native part is for the rank that needs it to report
            import mori_shmem.comm  # noqa: F401
        for name in modules:
            before = _threads()
            with contextlib.suppress(BaseException):  # likewise, and for what a module exits with
                importlib.import_module(name)
            if started := _threads().items() - before.items():
                return _refusal(name, sorted(thread for _, thread in started))
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page
    return None


def _threads() -> dict[int, str]:
    """This process's threads, those that native code has started too: number and name."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = {}
    for task in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{task}/comm") as comm:
            found[task] = named.get(task) or comm.read().strip()
    return found


def _refusal(module: str, threads: list[str]) -> Refused:
    error = ArgumentError(
        f"preload({module!r}): importing it starts threads ({', '.join(threads)}). Ranks are forked from the "
        "process that has imported it, and locks that those threads hold at that moment would stay locked "
        "in the ranks for ever. Leave it out of preload: ranks import it themselves. The next run goes "
        "without it"
    )
    return Refused(error, module)


def _too_few(fds: list[int]) -> Refused:
    """Of a caller's descriptors not all came."""
    return Refused(
        descriptors.limit_error("the process that forks ranks", f"{len(fds)} of 3 descriptors came", 3)
    )


def _reap() -> bool:
    """Collect ended supervisors; whether any is still running."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
    return False
