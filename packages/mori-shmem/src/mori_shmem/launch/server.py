"""The process that has torch imported and forks one supervisor per run. It has one thread and no state.

It ends when the caller's end of the control connection closes, after its supervisors have ended their ranks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import time
import warnings
from collections.abc import Sequence

from mori_shmem.launch import supervisor

_FAREWELL_S = 5.0  # a supervisor needs at most 2 s to end its ranks


def serve(control_fd: int, modules: Sequence[str] = ()) -> None:
    """Fork a supervisor for each request, until the caller is gone."""
    _preload(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=control_fd) as control:
        while True:
            data, fds, _, _ = socket.recv_fds(control, 16, 3)
            _reap()
            if not data:
                break
            if os.fork() == 0:
                control.close()
                supervisor.main(*fds)  # does not return
            for fd in fds:
                os.close(fd)
    deadline = time.monotonic() + _FAREWELL_S
    while _reap() and time.monotonic() < deadline:
        time.sleep(0.01)


def _preload(modules: Sequence[str]) -> None:
    """Import once what every rank needs; the forked ranks share the pages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        import cloudpickle  # type: ignore[import-untyped]  # noqa: F401
        import torch.distributed  # noqa: F401

        with contextlib.suppress(Exception):  # a broken native part is for the rank that needs it to report
            import mori_shmem.comm  # noqa: F401
        for name in modules:
            with contextlib.suppress(BaseException):  # likewise, and for what a module exits with
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page


def _reap() -> bool:
    """Collect ended supervisors; whether any is still running."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
    return False
