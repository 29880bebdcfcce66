"""From the steps of a put program to the operations of a stream. Pure: numbers in, numbers out.

    put       copy                      in pieces of no limit: a copy takes any size
    put_2d    copy_rows; one row, or rows without gaps, are a plain copy; pitches above the driver's limit:
    row by row wait      wait_at_least, wait_equal on all 64 bits (a signal of 2^32 or more is past every
    ">=" that is allowed) signal    set: write                no SM needed, also behind a kernel that fills
    the GPU
              add: a kernel of one thread, for there is no other way to add. It starts when an SM has room
              for it
    timestamp refused: the GPU has no clock that is CLOCK_MONOTONIC

What a graph may hold. A captured program does the same on every replay, so a value that grows from call to
call is wrong from the second replay on: a wait for ">= 7" is open for ever after, a set to 7 announces
nothing new. `check_replayable` lets into a graph only what is right on every replay:

  * add: the receiver sees one more each time, whether a replay or an eager call sent it. It compares with a
    count that it keeps itself, in device memory where its kernel is captured as well.
  * a toggle, 0 and 1: whoever waits for the 1 puts the 0 back before it lets the writer write 1 again. Let
    W be the writer of 1 and C the consumer. If C's write of 0 happens before W's next write of 1 (through
    the stream that both are joined to, or through an answer from C), then between two writes of 1 the word
    is 0 exactly once C has consumed the first: no 1 is lost, and no 1 is seen twice. Eager calls do the
    same, so any mix of replays and eager calls is one sequence of such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

from mori_shmem.errors import ArgumentError
from mori_shmem.targets.cuda.stream_calls import MAX_PITCH_BYTES

Operation = tuple[
    str, tuple[int, ...]
]  # a function of stream_calls.py (or "add") and what follows the stream
_REPLAYED = "a captured program does the same on every replay"


def put(dst: int, src: int, nbytes: int) -> list[Operation]:
    return [("copy", (dst, src, nbytes))] if nbytes else []


def put_2d(
    dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
) -> list[Operation]:
    if not row_bytes or not num_rows:
        return []
    if num_rows == 1 or row_bytes == dst_pitch == src_pitch:
        return put(dst, src, row_bytes * num_rows)
    if max(dst_pitch, src_pitch) > MAX_PITCH_BYTES:
        return [("copy", (dst + r * dst_pitch, src + r * src_pitch, row_bytes)) for r in range(num_rows)]
    return [("copy_rows", (dst, src, row_bytes, num_rows, dst_pitch, src_pitch))]


def signal(where: int, value: int, op: str) -> list[Operation]:
    return [("write" if op == "set" else "add", (where, value))]


def wait(where: int, value: int, cmp: str) -> list[Operation]:
    return [("wait_at_least" if cmp == ">=" else "wait_equal", (where, value))]


def check_replayable(operations: Sequence[Operation]) -> None:
    """Refuse values that a graph would bake in."""
    for name, arguments in operations:
        if name in ("write", "wait_at_least", "wait_equal") and arguments[1] > 1:
            verb = 'signal(op="set")' if name == "write" else "wait"
            raise ArgumentError(
                f"{verb} with value {arguments[1]} cannot go into a CUDA graph: {_REPLAYED}, so a value that "
                'grows would be stale from the second on. Use op="add" and let the receiver count, or a '
                "toggle: set 1, and whoever waited for it sets 0"
            )


# ---- misbehaviour on purpose, for mori_shmem.testing ----


class Faults:
    """What `CopyQueue.set_faults` asks for, applied to the operations of a queue."""

    def __init__(self, drop_every: int = 0, delay_us: int = 0, reorder: bool = False) -> None:
        self._drop_every, self._delay_us, self._reorder = drop_every, delay_us, reorder
        self._num_copies = 0

    def apply(self, operations: Sequence[Operation]) -> Sequence[Operation]:
        done: list[Operation] = []
        held: list[Operation] = []
        for operation in operations:
            if operation[0] not in ("copy", "copy_rows"):
                done.append(operation)
                if held and operation[0] in ("write", "add"):  # the signal has overtaken its copies
                    done += [("delay", (max(self._delay_us, 2000),)), *held]
                    held = []
                continue
            self._num_copies += 1
            if self._drop_every and self._num_copies % self._drop_every == 0:
                continue
            if self._reorder:
                held.append(operation)
            else:
                done += [("delay", (self._delay_us,))] * bool(self._delay_us) + [operation]
        return done + held
