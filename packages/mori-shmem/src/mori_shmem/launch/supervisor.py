"""One run: fork the ranks, hold the store, watch how each rank ends, leave nothing behind.

The supervisor never unpickles a user's object and runs no user code. Its loop waits for the first of
  * a message from a rank (its value or its exception), passed on to the caller,
  * the end of a rank's process,
  * the caller hanging up, or the time limit: all ranks are ended.
What it needs for that, and may not have, are file descriptors: it looks before it forks.
At the end every process that descends from a rank is killed too: the supervisor is their "subreaper", so
orphans become its children and cannot hide.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import time
import traceback
from dataclasses import dataclass, field

from mori_shmem import descriptors
from mori_shmem.errors import DescriptorLimitError
from mori_shmem.launch import rank as rank_process
from mori_shmem.launch import wire
from mori_shmem.launch.messages import Ended, Job, Raised, Refused, Report, Returned, Stopped, TimedOut

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_TERM_GRACE_S = 1.0  # between SIGTERM and SIGKILL
_CULPRIT_GRACE_S = 0.5  # a rank complains about another: how long to wait for that other one to be heard
_STACK_GRACE_S = 0.3  # for a rank to write down where it stands
libc = ctypes.CDLL(None, use_errno=True)


def main(run_fd: int, stdout_fd: int, stderr_fd: int) -> None:
    """The life of a supervisor; ends the process."""
    status = 1
    try:
        server_pid = os.getppid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        os.close(stdout_fd)
        os.close(stderr_fd)
        if os.getppid() == server_pid:
            with socket.socket(fileno=run_fd) as caller, contextlib.suppress(EOFError, ConnectionError):
                job: Job = wire.receive(caller)
                try:
                    with descriptors.limit_named(f"run_ranks of {job.world_size} ranks"):
                        descriptors.check_room(
                            f"run_ranks of {job.world_size} ranks", _needed(job.world_size)
                        )
                        _Run(job, caller).supervise()
                except DescriptorLimitError as error:
                    caller.sendall(wire.encode(Refused(error)))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _needed(world_size: int) -> int:
    """Descriptors of a run: three for each rank, two for its connections to the store (of `init`, of
    torch.distributed), and the store's own."""
    return 5 * world_size + 8


@dataclass
class _Rank:
    """What the supervisor knows of one rank."""

    rank: int
    pid: int
    pidfd: int
    pipe: int  # what the rank reports; -1 once it is closed
    stack_fd: int  # memfd: where faulthandler writes
    inbox: wire.Inbox = field(default_factory=wire.Inbox)
    running: bool = True
    reported: bool = False

    def stack(self) -> str:
        """Where Python stood when the rank was asked, or crashed; without the launcher's own frames."""
        text = os.pread(self.stack_fd, os.fstat(self.stack_fd).st_size, 0).decode(errors="replace")
        ours = os.path.dirname(__file__)
        lines = [line for line in text.splitlines() if ours not in line and 'File "<string>"' not in line]
        return "\n".join(lines).strip()


class _Run:
    def __init__(self, job: Job, caller: socket.socket) -> None:
        self._job = job
        self._caller = caller
        self._caller_is_there = True
        self._deadline = None if job.timeout_s is None else time.monotonic() + job.timeout_s
        self._stop_at: float | None = None  # when to end what still runs, because a rank failed
        self._ranks: dict[int, _Rank] = {}

    def supervise(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=self._job.world_size + 16)
        port = listener.getsockname()[1]
        for rank in range(self._job.world_size):
            self._fork(rank, port, listener)
        _store = _serve_store(listener, port)
        poll = select.poll()
        poll.register(self._caller, select.POLLIN)
        for r in self._ranks.values():
            poll.register(r.pidfd, select.POLLIN)
            poll.register(r.pipe, select.POLLIN)
        while any(r.running for r in self._ranks.values()):
            ready = {fd for fd, _ in poll.poll(self._patience_ms())}
            for r in self._ranks.values():
                if r.pipe in ready or r.pidfd in ready:
                    self._listen_to(r, poll)
            if self._caller.fileno() in ready:  # nothing is ever sent after the job: this is the caller's end
                self._caller_is_there = False
                poll.unregister(self._caller)
                self._end_all()
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self._time_out()
            elif self._stop_at is not None and time.monotonic() >= self._stop_at:
                self._end_all()
        _kill_descendants()

    def _fork(self, rank: int, port: int, listener: socket.socket) -> None:
        read_end, write_end = os.pipe()
        stack_fd = os.memfd_create("mori-stack", os.MFD_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                listener.close()
                self._caller.close()
                for other in self._ranks.values():
                    for fd in (other.pidfd, other.pipe, other.stack_fd):
                        os.close(fd)
                os.close(read_end)
                rank_process.main(self._job, rank, port, write_end, stack_fd)
            finally:
                os._exit(1)
        os.close(write_end)
        os.set_blocking(read_end, False)
        self._ranks[rank] = _Rank(rank, pid, os.pidfd_open(pid), read_end, stack_fd)

    def _patience_ms(self) -> float | None:
        limits = [t for t in (self._deadline, self._stop_at) if t is not None]
        return max(0.0, (min(limits) - time.monotonic()) * 1000 + 1) if limits else None

    # ---- what a rank says, and how it ends ----

    def _listen_to(self, r: _Rank, poll: select.poll) -> None:
        ended = _has_ended(r.pid) if r.running else None  # asked first: what it wrote is then complete
        self._read(r, poll)
        for report in r.inbox.take():
            self._pass_on(r, report)
        if ended is not None:
            r.running = False
            poll.unregister(r.pidfd)
            if not r.reported:
                self._pass_on(r, Stopped(r.rank) if self._ending else Ended(r.rank, ended, r.stack()))

    def _read(self, r: _Rank, poll: select.poll) -> None:
        with contextlib.suppress(BlockingIOError):
            while r.pipe >= 0:
                data = os.read(r.pipe, 1 << 20)
                r.inbox.add(data)
                if not data:  # said all it had to say; it may take a while to end
                    poll.unregister(r.pipe)
                    os.close(r.pipe)
                    r.pipe = -1

    def _pass_on(self, r: _Rank, report: Report) -> None:
        if r.reported:
            return
        r.reported = True
        if self._caller_is_there:
            with contextlib.suppress(ConnectionError):
                self._caller.sendall(wire.encode(report))
        if self._job.stop_at_first_failure and not isinstance(report, Returned | Stopped):
            complains = isinstance(report, Raised) and report.consequence
            stop_at = time.monotonic() + (_CULPRIT_GRACE_S if complains else 0.0)
            self._stop_at = min(self._stop_at or stop_at, stop_at)

    # ---- ending ranks ----

    _ending = False

    def _time_out(self) -> None:
        """Ask each unfinished rank where it stands, then end them all."""
        unfinished = [r for r in self._ranks.values() if r.running]
        for r in unfinished:
            _send_signal(r.pid, signal.SIGUSR1)
        time.sleep(_STACK_GRACE_S)
        for r in unfinished:
            self._pass_on(r, TimedOut(r.rank, r.stack()))
        self._end_all()

    def _end_all(self) -> None:
        """SIGTERM, a moment, SIGKILL. The main loop then sees them end."""
        self._ending = True
        self._deadline = self._stop_at = None
        running = [r for r in self._ranks.values() if r.running]
        for r in running:
            _send_signal(r.pid, signal.SIGTERM)
        give_up = time.monotonic() + _TERM_GRACE_S
        while time.monotonic() < give_up and not all(_exited(r.pidfd) for r in running):
            time.sleep(0.005)
        for r in running:
            _send_signal(r.pid, signal.SIGKILL)


def _serve_store(listener: socket.socket, port: int) -> object:
    """The store that the ranks meet in; threads start here, after the last fork."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _has_ended(pid: int) -> int | None:
    """The exit code of our child, negative for a signal; None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _exited(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _send_signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_descendants() -> None:
    """End what the ranks left running. Killing a process makes its children ours, hence the loop."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for child in _children():
                _send_signal(child, signal.SIGKILL)
            os.waitpid(-1, 0)


def _children() -> list[int]:
    pids = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as f:
            pids += [int(pid) for pid in f.read().split()]
    return pids
