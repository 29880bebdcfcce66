"""The caller's side of a run: find or start the server, send the job, turn the reports into values or an
error."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mori_shmem import descriptors
from mori_shmem.errors import ArgumentError, RankFailed, RunTimeout
from mori_shmem.launch import supervisor, wire
from mori_shmem.launch.messages import Job, Raised, Refused, Report, Returned, Stopped, TimedOut
from mori_shmem.launch.pickling import dumps_for_ranks, loads
from mori_shmem.variables import SOCKET_IFNAME, TABLE

LONGEST_S = 1e8  # three years: what clocks of the kernel take
_GOODBYE_S = 5.0  # the supervisor needs at most two seconds
_BOOT = "import sys; sys.path[:] = {path}; from mori_shmem.launch.server import serve; serve({fd}, {modules})"


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `error` is None exactly where fn returned."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    stopped: bool = False  # ended because another rank had failed
    consequence: bool = False  # complains about another rank


def run_job(
    fn: Callable[..., object],
    args: Sequence[object],
    world_size: int,
    timeout_s: float | None,
    *,
    stop_at_first_failure: bool,
    from_here: bool = False,
) -> list[Outcome]:
    """Run the job to its end; the outcomes in the order in which they came in, values in rank order last."""
    if not callable(fn):
        raise ArgumentError(f"fn={fn!r} cannot be called")
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and 0 < timeout_s <= LONGEST_S):
        raise ArgumentError(
            f"timeout_s={timeout_s!r}: seconds above 0, at most {LONGEST_S:g}, or None for no limit"
        )
    if from_here:
        _check_one_thread()
    job = Job(
        call=dumps_for_ranks(fn, tuple(args)),
        world_size=world_size,
        timeout_s=timeout_s,
        stop_at_first_failure=stop_at_first_failure,
        environ={"GLOO_SOCKET_IFNAME": TABLE.read()[SOCKET_IFNAME], **os.environ},
        cwd=os.getcwd(),
        sys_path=list(sys.path),
        argv=list(sys.argv),
    )
    sys.stdout.flush()
    sys.stderr.flush()
    with descriptors.limit_named(f"run_ranks of {world_size} ranks"):
        mine, theirs = socket.socketpair()
    with mine, _forked_supervisor(mine, theirs) if from_here else contextlib.nullcontext():
        with theirs:
            if not from_here:
                with descriptors.limit_named(f"run_ranks of {world_size} ranks"):
                    _server.request_run(theirs)
        try:
            with contextlib.suppress(ConnectionError):  # refused already: the reports say why
                mine.sendall(wire.encode(job))
            reports = [_received(mine) for _ in range(world_size)]
        except BaseException:  # Ctrl-C, say: hanging up is what ends the ranks
            mine.shutdown(socket.SHUT_WR)
            raise
        finally:
            _wait_for_end(mine)
    outcomes = [_outcome(report, world_size, timeout_s) for report in reports]
    return outcomes if stop_at_first_failure and _failed(outcomes) else sorted(outcomes, key=lambda o: o.rank)


def _check_one_thread() -> None:
    """A fork takes one thread along, and the locks that the others hold stay locked. Idle threads of native
    libraries (torch's pools, for one) hold none and are not counted."""
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        raise ArgumentError(
            f"from_here: this process has other threads ({', '.join(others)}), and a fork would leave locks "
            "of theirs locked in the ranks for ever: join them first, or start the ranks without from_here"
        )


@contextlib.contextmanager
def _forked_supervisor(mine: socket.socket, theirs: socket.socket) -> Iterator[None]:
    """A supervisor that is a child of this process, gone at the end."""
    gc.collect()
    gc.freeze()  # a collection in a rank would touch, and so copy, every page
    pid = os.fork()
    if pid == 0:
        mine.close()
        supervisor.main(theirs.fileno(), os.dup(1), os.dup(2))  # does not return
    try:
        yield
    finally:
        gc.unfreeze()
        os.waitpid(pid, 0)


def _received(sock: socket.socket) -> Report:
    try:
        report: Report | Refused = wire.receive(sock)
    except (EOFError, ConnectionError) as end:
        raise RankFailed(
            "the process that supervises the ranks ended unexpectedly (killed, or out of memory?); its "
            "ranks end with it"
        ) from end
    if isinstance(report, Refused):
        _server.drop(report.module)
        raise report.error
    return report


def _wait_for_end(sock: socket.socket) -> None:
    """Return when the supervisor has reaped everything, so that no process of the run is left."""
    sock.settimeout(_GOODBYE_S)
    with contextlib.suppress(ConnectionError, TimeoutError):
        while sock.recv(1 << 16):
            pass


def first_failure(outcomes: Sequence[Outcome]) -> BaseException | None:
    """The error to raise: the first that does not merely complain about another rank, else the first."""
    failed = _failed(outcomes)
    if not failed:
        return None
    cause = next((o for o in failed if not o.consequence), failed[0])
    assert cause.error is not None
    if isinstance(cause.error, RunTimeout):
        return _all_late([o.error for o in failed if isinstance(o.error, RunTimeout)])
    for other in failed:
        if other is not cause:
            cause.error.add_note(
                f"rank {other.rank} also failed: {type(other.error).__name__}: {other.error}"
            )
    return cause.error


def _all_late(errors: list[RunTimeout]) -> RunTimeout:
    """One error for all the ranks that had not finished."""
    ranks = sorted(rank for error in errors for rank in error.ranks)
    return RunTimeout("\n".join(str(error) for error in errors), ranks=ranks)


def _failed(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [o for o in outcomes if o.error is not None and not o.stopped]


def _outcome(report: Report, world_size: int, timeout_s: float | None) -> Outcome:
    rank = report.rank
    if isinstance(report, Returned):
        return Outcome(rank, value=loads(report.value))
    if isinstance(report, Raised):
        return Outcome(rank, error=_exception(report, world_size), consequence=report.consequence)
    if isinstance(report, Stopped):
        return Outcome(rank, error=RankFailed(f"rank {rank} was ended by run_ranks", rank=rank), stopped=True)
    if isinstance(report, TimedOut):
        message = f"rank {rank} of {world_size} had not finished after timeout_s={timeout_s:g}"
        return Outcome(rank, error=RunTimeout(message + _stood(report.stack), ranks=[rank]), consequence=True)
    how = f"rank {rank} of {world_size} {_how_it_ended(report.exit_code)} before its function returned"
    return Outcome(rank, error=RankFailed(how + _stood(report.stack), rank=rank, exit_code=report.exit_code))


def _exception(report: Raised, world_size: int) -> BaseException:
    note = f"raised by rank {report.rank} of {world_size}:\n{report.traceback}"
    if report.exception is None:
        return RankFailed(f"an error that cannot travel between processes was {note}", rank=report.rank)
    error: BaseException = loads(report.exception)
    error.add_note(note)
    return error


def _how_it_ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"was killed by signal {-exit_code}"


def _stood(stack: str) -> str:
    return f"; it stood at\n{stack}" if stack else ""


class _Server:
    """The one server of this process. Started at first use, started anew if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._modules: list[str] = []

    def preload(self, names: Sequence[str]) -> None:
        """A server that lacks one of these makes way for another."""
        with self._lock:
            new = [name for name in names if name not in self._modules]
            if new:
                self._modules = [*self._modules, *new]
                self._stop()

    def drop(self, name: str) -> None:
        """The next server goes without this module, if it is one."""
        with self._lock:
            if name in self._modules:
                self._modules.remove(name)
                self._stop()

    def request_run(self, connection: socket.socket) -> None:
        """Have a supervisor forked. It takes its job from `connection` and writes to our stdout and
        stderr."""
        fds = [connection.fileno(), 1, 2]
        with self._lock:
            for _ in range(2):
                control = self._control or self._start()
                with contextlib.suppress(OSError):
                    socket.send_fds(control, [b"run"], fds)
                    return
                self._stop()  # it was killed: one more try with a fresh one
        raise RankFailed(
            "the process that forks ranks cannot be started or dies at once: see its output above"
        )

    def _start(self) -> socket.socket:
        if not sys.executable:
            raise RankFailed(
                "sys.executable is empty: run_ranks needs a Python interpreter to start ranks with"
            )
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = [str(p) for p in sys.path]
            boot = _BOOT.format(path=path, fd=theirs.fileno(), modules=self._modules)
            self._process = subprocess.Popen(
                [sys.executable, "-c", boot],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C goes to the caller alone, which then ends the ranks
            )
        atexit.register(self._stop)
        return self._control

    def _stop(self) -> None:
        """Close the connection, upon which the server ends its runs and itself."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait()
        self._control = self._process = None
        atexit.unregister(self._stop)

    def forget(self) -> None:
        """In a forked child: the server belongs to the parent; drop our copy of the connection to it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # not our child: nothing to wait for
        atexit.unregister(self._stop)
        self.__init__()  # type: ignore[misc]


def preload(*names: str) -> None:
    """Have these modules imported in the process that ranks are forked from, once, as torch is. One that
    starts threads when it is imported is refused by the next run, by name. What cannot be imported there is
    left to the rank that needs it. A process that is running for ranks already is replaced, once the runs
    under way have ended."""
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"preload({name!r}): names of modules are needed, as in preload('pytest')")
    _server.preload(names)


_server = _Server()
os.register_at_fork(after_in_child=_server.forget)
