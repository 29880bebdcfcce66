"""The verbs of a copy queue, their argument checks, and the addresses that the core takes.

Both `CopyQueue` (submits at once) and `PutProgram` (keeps the steps) speak these verbs, so what one accepts
the other accepts. A step is a pair: the name of the core's verb and its arguments as plain integers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mori_shmem.errors import ArgumentError, LayoutError
from mori_shmem.window import Ref, check_ref, check_word

if TYPE_CHECKING:
    from mori_shmem.comm import Communicator

Step = tuple[str, tuple[Any, ...]]
SIGNAL_OPS = ("set", "add")
QUEUE_COMPARISONS = (">=", "==")
COMPARISONS = ("<", "<=", "==", "!=", ">=", ">")


def put(comm: Communicator, dst: Ref, src: Ref, nbytes: int) -> Step:
    check_count("nbytes", nbytes)
    check_ref(comm, dst, nbytes, "dst")
    check_ref(comm, src, nbytes, "src")
    if abs(dst.address - src.address) < nbytes:
        raise LayoutError(f"put of {nbytes} bytes from {src} to {dst}: source and destination overlap")
    return "put", (dst.address, src.address, nbytes)


def put_2d(
    comm: Communicator, dst: Ref, src: Ref, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
) -> Step:
    for name, count in (
        ("row_bytes", row_bytes),
        ("num_rows", num_rows),
        ("dst_pitch", dst_pitch),
        ("src_pitch", src_pitch),
    ):
        check_count(name, count)
    if num_rows > 1 and min(dst_pitch, src_pitch) < row_bytes:
        raise LayoutError(
            f"put_2d: dst_pitch={dst_pitch}, src_pitch={src_pitch}, row_bytes={row_bytes}: rows would "
            "overlap; a pitch is the distance between the starts of two rows"
        )
    rows = max(num_rows - 1, 0)
    check_ref(comm, dst, rows * dst_pitch + row_bytes if num_rows else 0, "dst")
    check_ref(comm, src, rows * src_pitch + row_bytes if num_rows else 0, "src")
    if _rows_overlap(dst.address - src.address, row_bytes, num_rows, dst_pitch, src_pitch):
        raise LayoutError(f"put_2d of {num_rows} rows from {src} to {dst}: source and destination overlap")
    return "put_2d", (dst.address, src.address, row_bytes, num_rows, dst_pitch, src_pitch)


def _rows_overlap(distance: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int) -> bool:
    """Whether two sets of rows touch. Equal pitches may interleave; else their bounding boxes must be
    apart."""
    if not row_bytes or not num_rows:
        return False
    src_end, dst_end = ((num_rows - 1) * pitch + row_bytes for pitch in (src_pitch, dst_pitch))
    if distance >= src_end or -distance >= dst_end:
        return False
    if num_rows == 1 or dst_pitch != src_pitch:
        return True
    return not row_bytes <= distance % dst_pitch <= dst_pitch - row_bytes


def signal(comm: Communicator, where: Ref, value: int, op: str) -> Step:
    check_word(comm, where, "signal")
    check_value("value", value, 1 << 64)
    check_one_of("op", op, SIGNAL_OPS)
    return "signal", (where.address, value, op)


def wait(comm: Communicator, where: Ref, value: int, cmp: str) -> Step:
    check_word(comm, where, "wait")
    check_one_of("cmp", cmp, QUEUE_COMPARISONS)
    if type(value) is int and value >= 1 << 32:
        raise ArgumentError(
            f"a queue waits for value {value}: it compares the low 32 bits, so 0..{(1 << 32) - 1} is "
            "allowed; comm.wait compares all 64"
        )
    check_value("value", value, 1 << 32)
    return "wait", (where.address, value, cmp)


def timestamp(comm: Communicator, where: Ref) -> Step:
    check_word(comm, where, "timestamp")
    return "timestamp", (where.address,)


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 0:
        raise ArgumentError(f"{name}={value!r}: a whole number of at least 0 is needed")


def check_value(name: str, value: object, limit: int) -> None:
    if type(value) is not int or not 0 <= value < limit:
        raise ArgumentError(f"{name}={value!r}: a whole number in 0..{limit - 1} is needed")


def check_one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"{name}={value!r} is not known; allowed: {', '.join(allowed)}")


def check_ends(what: str, mine: int, peer: int, *refs: Ref) -> None:
    """A queue serves one pair: it may touch the peer's part and mine, no third rank's."""
    for ref in refs:
        if ref.rank != peer and ref.rank != mine:
            raise ArgumentError(
                f"{what} of the queue from rank {mine} to rank {peer} touches rank {ref.rank}'s part "
                f"({ref}): use comm.queue({ref.rank})"
            )
