"""Rows spread over ranks by ids in the data, and brought back: loops in C++ for ops whose ranks live on the
host.

They work on addresses, because what they touch lies in windows of several processes; the op that calls them
has checked its tensors when it took them. All release the GIL.

A slot map says for each of n rows and k slots where that slot's copy of the row is: group * stride + index
within the group, or `null` where it has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mori_shmem.core import native


class SlotMap(NamedTuple):
    """int32 [rows, width] at an address; group * stride + index, or null."""

    address: int
    rows: int
    width: int
    stride: int
    null: int


class RowCode(NamedTuple):
    """How a row of `width` numbers is stored: codes of a kind, then (scale_block > 0) one fp32 scale per
    block of them. Kinds: bf16, fp16, fp32, e4m3fn, e4m3fnuz, e2m1 (two a byte, the first in the low half)."""

    kind: str
    width: int
    scale_block: int = 0

    @property
    def nbytes(self) -> int:
        return native.row_bytes(self)


def group_slots(ids: int, slot_map: SlotMap, first: int, group_size: int, num_groups: int) -> list[int]:
    """Fill the map from int32 ids of the same shape; returns the rows of each group.

    Id i belongs to group (i - first) // group_size. Ids of no group, and later ids of a group that the row
    has named already, get `null`. Within a group rows are numbered in their order.
    """
    return native.group_slots(ids, slot_map, first, group_size, num_groups)


def shift_slots(slot_map: SlotMap, first: Sequence[int]) -> None:
    """Add first[group] to every index of the map."""
    native.shift_slots(slot_map, first)


def scatter_rows(
    slot_map: SlotMap, fields: Sequence[tuple[int, int]], targets: Sequence[Sequence[int]]
) -> None:
    """Copy every field (address, row bytes) of every row to targets[group][field] + index * row bytes, for
    each slot that has a place. A target of 0 leaves that field out for the group."""
    native.scatter_rows(slot_map, fields, targets)


def copy_ranges(ranges: Sequence[tuple[int, int, int]]) -> None:
    """(to, from, nbytes) each; ranges do not overlap."""
    native.copy_ranges(ranges)


def sum_rows(
    out: int,
    out_kind: str,
    slot_map: SlotMap,
    tables: Sequence[int],
    pitch: int,
    code: RowCode,
    factors: int = 0,
    ids: int = 0,
) -> None:
    """out[row] = sum over the row's slots, in their order, of the row at tables[group] + index * pitch.

    Added in fp32, the first one as it is; rounded once to `out_kind`. No slot: zeros. A table of 0 leaves the
    group out. `factors`, with the `ids` that the map was made from: fp32 for each slot, by which its row is
    multiplied; factors of later slots with the same id are added to that of the first.
    """
    native.sum_rows(out, out_kind, slot_map, tables, pitch, code, factors, ids)


def quantize_rows(out: int, rows: int, num_rows: int, code: RowCode) -> None:
    """bf16 rows as rows of `code`, one after the other.

    With scales, a block's largest magnitude gets the largest code; zeros have scale 1; a block that holds an
    infinity or a NaN becomes NaN. Without, values beyond the largest code become that.
    """
    native.quantize_rows(out, rows, num_rows, code)


def count_ids(ids: int, num_ids: int, first: int, num: int, counts: int) -> None:
    """counts[i] (int32) = how many of the int32 ids are first + i."""
    native.count_ids(ids, num_ids, first, num, counts)
