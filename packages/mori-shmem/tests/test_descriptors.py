"""Memory is shared by file descriptors; where a process may hold no more of them, all ranks are told so."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import mori_shmem
import pytest
from mori_shmem import descriptors, errors
from mori_shmem.core import CoreError, core_error
from mori_shmem.deadline import Deadline
from mori_shmem.launch import client
from mori_shmem.mesh import Mesh


@contextlib.contextmanager
def room_for(more: int) -> Iterator[None]:
    """At most so many descriptors more than there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = []
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit + more, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)


def no_more_open(before: list[str]) -> None:
    assert len(os.listdir("/proc/self/fd")) == len(before)


# 0: none of its own; 1: its own, and no peer's; 2: one peer's, and not the other's; 3: no copy of its own
@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_a_rank_that_may_hold_no_more_descriptors_ends_alloc_on_all_ranks(more: int) -> None:
    def rank() -> str:
        with mori_shmem.init("host", timeout_s=20) as comm:
            before = os.listdir("/proc/self/fd")
            began = time.monotonic()
            with (
                room_for(more) if comm.rank == 1 else contextlib.nullcontext(),
                pytest.raises(errors.DescriptorLimitError) as told,
            ):
                comm.alloc(4096)
            assert time.monotonic() - began < 15  # and not when a limit passed
            no_more_open(before)
            window = comm.alloc(4096)  # nothing was harmed
            comm.barrier()
            window.close()
            return str(told.value)

    for text in mori_shmem.run_ranks(rank, 3):
        assert "alloc failed on rank 1: rank 1 of 3, in alloc" in text
        assert "may hold" in text
        assert "ulimit -n" in text
        if more:
            assert f"{more - 1} of 3 descriptors of shared memory came" in text


# Where init does not see it coming (needed_by_init stands still): 0: no socket to meet the others by, so that
# they wait to the limit; 3: it leaves them in the middle; 6: at the end, when they are done
@pytest.mark.parametrize(
    ("more", "timeout_s", "others"), [(0, 3, "PeerTimeout"), (3, 20, "PeerDied"), (6, 20, "made")]
)
def test_a_rank_that_may_hold_too_few_says_so_in_init(more: int, timeout_s: float, others: str) -> None:
    def rank() -> str:
        mori_shmem.init("host", timeout_s=20).close()
        descriptors.needed_by_init = lambda world_size: -1
        with room_for(more) if int(os.environ["RANK"]) == 1 else contextlib.nullcontext():
            try:
                mori_shmem.init("host", timeout_s=timeout_s, name="second").close()
            except errors.MoriError as error:
                return f"{type(error).__name__}: {error}"
        return "made"

    told = mori_shmem.run_ranks(rank, 3)
    assert told[1].startswith("DescriptorLimitError: rank 1 of 3, in init"), told
    assert "ulimit -n" in told[1]
    assert {text.partition(":")[0] for text in told[::2]} <= {others, "PeerDied"}, told


def test_a_rank_that_sees_it_coming_tells_the_others_at_once() -> None:
    def rank() -> tuple[str, str]:
        mori_shmem.init("host", timeout_s=60).close()
        needed, texts = descriptors.needed_by_init(3), []
        for more in (0, needed - 1, needed):
            with room_for(more) if int(os.environ["RANK"]) == 1 else contextlib.nullcontext():
                try:
                    mori_shmem.init("host", timeout_s=60, name=f"with {more}").close()
                except errors.DescriptorLimitError as error:
                    texts.append(str(error))
        return tuple(texts)

    said = f"rank 1 of 3, in init: {descriptors.needed_by_init(3)} more file descriptors are needed"
    for number, texts in enumerate(mori_shmem.run_ranks(rank, 3, timeout_s=30)):
        assert len(texts) == 2, texts  # and with just enough it is made
        for text, more in zip(texts, (0, descriptors.needed_by_init(3) - 1), strict=True):
            assert text.startswith(
                f"{'' if number == 1 else 'rank 1 cannot take part: '}{said}, {more} can be"
            )
            assert "ulimit -n" in text


@contextlib.contextmanager
def ranks_limited_to(number: int) -> Iterator[None]:
    """What is forked for a run may hold so many."""
    mori_shmem.run_ranks(os.getpid, 1)  # the process that they are forked from is there
    server = client._server._process
    assert server is not None
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (number, before[1]))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)


def test_whatever_ranks_may_hold_they_run_or_the_limit_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    """8 ranks that use torch.distributed first, as benches do: from too few for the launcher's own, over too
    few for torch's store in it, to enough."""

    def rank() -> int:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        with mori_shmem.init("host") as comm:
            comm.barrier()
        dist.destroy_process_group()
        return 1

    ran = []
    for number in (*range(6, 62, 5), 64):
        refusal = ""
        with ranks_limited_to(number):
            try:
                ran.append((number, sum(mori_shmem.run_ranks(rank, 8, timeout_s=60))))
            except errors.DescriptorLimitError as error:
                refusal = str(error)
        if not ran:
            assert f"may hold {number} file descriptors" in refusal
            assert number < 8 or "ulimit -n 64" in refusal
    assert (64, 8) in ran
    assert capfd.readouterr().err == ""  # and nobody else complains


class Crowded:
    """A socket whose descriptors the kernel does not take for the first so many tries."""

    def __init__(self, sock: socket.socket, tries: int) -> None:
        self._sock, self.left = sock, tries

    def sendmsg(self, data: Any, ancillary: Any = ()) -> int:
        if ancillary and self.left:
            self.left -= 1
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return self._sock.sendmsg(data, ancillary)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def crowded_pair(tries: int) -> tuple[Mesh, Mesh]:
    """Ranks 0 and 1; what rank 0 sends meets the limit."""
    one, other = socket.socketpair()
    return Mesh(0, 2, {1: Crowded(one, tries)}), Mesh(1, 2, {0: other})  # type: ignore[dict-item]


def test_descriptors_that_the_kernel_does_not_take_yet_are_sent_again() -> None:
    mine, theirs = crowded_pair(5)
    got: list[Any] = []
    peer = threading.Thread(target=lambda: got.extend(theirs.exchange("hand over", 1, Deadline(20))))
    peer.start()
    with open(os.devnull) as file:
        sent = mine.exchange("hand over", 0, Deadline(20), [file.fileno()])
        peer.join()
        assert os.fstat(got[0].fds[0]).st_ino == os.fstat(file.fileno()).st_ino
    for message in [*sent, *got]:
        for fd in message.fds:
            os.close(fd)
    mine.close()
    theirs.close()


def test_descriptors_that_the_kernel_never_takes_are_what_was_late() -> None:
    mine, theirs = crowded_pair(1 << 30)
    with open(os.devnull) as file, pytest.raises(errors.DescriptorLimitError, match=r"under way.*ulimit -n"):
        mine.exchange("hand over", 0, Deadline(0.2), [file.fileno()])
    mine.close()
    theirs.close()


def test_what_an_error_came_from_is_looked_at() -> None:
    late = errors.TransportInert("cannot start")
    late.__cause__ = core_error("system", call="memfd_create", errno=errno.EMFILE, error="")
    assert descriptors.ran_out(late)
    assert not descriptors.ran_out(errors.TransportInert("cannot start"))
    assert descriptors.ran_out(RuntimeError("The server socket has failed to listen: Too many open files"))
    with pytest.raises(CoreError), descriptors.limit_named("rank 0"):
        raise core_error("system", call="mmap", errno=errno.ENOMEM, error="")
    named = pytest.raises(errors.DescriptorLimitError, match=r"rank 0: no file descriptor was left.*ulimit")
    with named, descriptors.limit_named("rank 0"):
        raise late


def test_failures_that_do_not_say_why_are_asked_about() -> None:
    assert descriptors.shortage() is None
    with room_for(0):
        assert descriptors.shortage() == errno.EMFILE
