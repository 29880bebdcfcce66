"""What the Triton kernels leave in an op's record, in words."""

from __future__ import annotations

from collections.abc import Sequence

from mori_shmem.errors import ArgumentError, CollectiveMismatch, MoriError, UnsupportedShape

from mori_ep import formats
from mori_ep.layout import HEADER
from mori_ep.signs import difference

WORDS = 5
_OVERFLOW, _FIRST_FIELD, _TOO_FEW_ROWS, _DIFFERENT_COMBINE = 1, 2, 7, 8


def error_of(record: Sequence[int]) -> MoriError:
    """(what, four words about it): the error that a record stands for."""
    what, a, b, c, d = record
    if what == _OVERFLOW:
        return UnsupportedShape(
            f"rank {a} sends {c} rows to rank {b} in one dispatch, which has room for {d} of each rank: make "
            "the op with a larger max_total_recv_tokens, or 0"
        )
    if what == _TOO_FEW_ROWS:
        return ArgumentError(
            f"rank {a} combined an input of {b} rows (or weights of so many), and its dispatch had received "
            f"{c}: all rows are needed, in dispatch's order"
        )
    if what == _DIFFERENT_COMBINE:
        first, second = sorted([(a, b), (c, d)])
        return CollectiveMismatch(f"combine: {difference(first, second)}")
    name = HEADER[what - _FIRST_FIELD + 1]
    one, other = (formats.header_text(name, value) for value in (b, d))
    return CollectiveMismatch(
        f"dispatch: {name} is {one} on rank {a} and {other} on rank {c}: all ranks must dispatch rows of one "
        "kind"
    )
