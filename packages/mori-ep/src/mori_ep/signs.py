"""What a rank brings to a combine, in 32 bits: what ranks tell each other and compare.

    weights | none although it has rows | from the registered buffer (cuda) | dtype's code | hidden size

A rank that has received no rows may be given no weights where others have some: it says neither.
"""

from __future__ import annotations

from mori_shmem.errors import CollectiveMismatch

from mori_ep import formats
from mori_ep.config import MAX_HIDDEN
from mori_ep.targets import CombineShape

SIGN_WEIGHTS, SIGN_NO_WEIGHTS, SIGN_REGISTERED, SIGN_DTYPE = 1 << 31, 1 << 30, 1 << 29, 24
assert (1 << SIGN_DTYPE) > MAX_HIDDEN
SIGN_ROWS = SIGN_NO_WEIGHTS - 1  # of it, what must be the same everywhere


def sign_of(shape: CombineShape) -> int:
    """Of the rows of a combine."""
    return formats.CODES[shape.dtype] << SIGN_DTYPE | shape.hidden


def said_of_weights(shape: CombineShape, num_received: int) -> int:
    """What a rank says of its weights beside that."""
    if shape.weights:
        return SIGN_WEIGHTS
    return SIGN_NO_WEIGHTS if num_received else 0


def compare_signs(call: int, signs: list[tuple[int, int]]) -> None:
    """(rank, sign) of all that are known here; the error names the first two that differ."""
    said = 0
    for _, sign in signs:
        said |= sign
    rows = {sign & SIGN_ROWS for _, sign in signs}
    if len(rows) == 1 and not (said & SIGN_WEIGHTS and said & SIGN_NO_WEIGHTS):
        return
    first = min(signs)
    if len(rows) > 1:
        second = min((r, s) for r, s in signs if (s ^ first[1]) & SIGN_ROWS)
    else:
        first = min((r, s) for r, s in signs if s & SIGN_WEIGHTS)
        second = min((r, s) for r, s in signs if s & SIGN_NO_WEIGHTS)
    raise CollectiveMismatch(f"combine {call}: {difference(first, second)}")


def difference(first: tuple[int, int], second: tuple[int, int]) -> str:
    """What two (rank, sign) that do not go together bring."""
    (rank, sign), (other, another) = first, second
    return (
        f"rank {rank} brings {sign_text(sign)}, rank {other} {sign_text(another)}: all ranks must combine "
        "rows of one kind, with weights or without"
    )


def sign_text(sign: int) -> str:
    dtype = formats.DTYPES[sign >> SIGN_DTYPE & 0x1F]
    weights = "with" if sign & SIGN_WEIGHTS else "without"
    registered = " in the registered buffer" if sign & SIGN_REGISTERED else ""
    return f"[*, {sign & MAX_HIDDEN}] {formats.names([dtype])} {weights} weights{registered}"
