"""Each fault changes the output, and only in the way it says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from mori_bench import Fault, faults


class Grid:
    """As much of a two-dimensional tensor as the faults use."""

    dtype = "float"

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.rows[0])

    def clone(self) -> Grid:
        return Grid([list(row) for row in self.rows])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return Grid(self.rows[key])
        return [row[key[1]] for row in self.rows]  # [..., column]

    def __setitem__(self, key: Any, value: Any) -> None:
        if key is ...:
            self.rows = [[value] * len(row) for row in self.rows]
        elif isinstance(key, slice):
            self.rows[key] = [list(row) for row in value.rows]
        elif key[0] is ...:
            for row, item in zip(self.rows, value, strict=True):
                row[key[1]] = item
        else:
            self.rows[key[0]][key[1]] = value


@pytest.fixture
def out() -> Grid:
    return Grid([[10.0 * row + column for column in range(4)] for row in range(6)])


def test_BE_1_swap_columns(out: Grid) -> None:
    broken = faults.swap_columns(out)
    assert broken.rows[2] == [23, 21, 22, 20]
    assert out.rows[2] == [20, 21, 22, 23]


def test_BE_1_swap_row_tiles(out: Grid) -> None:
    assert [row[0] for row in faults.swap_row_tiles(out, 2).rows] == [40, 50, 20, 30, 0, 10]
    # a tile of 128 rows on 6 rows: halves
    assert [row[0] for row in faults.swap_row_tiles(out).rows] == [30, 40, 50, 0, 10, 20]
    odd = Grid(out.rows[:5])
    assert [row[0] for row in faults.swap_row_tiles(odd).rows] == [30, 40, 20, 0, 10]


def test_BE_1_one_nan(out: Grid) -> None:
    broken = faults.one_nan(out)
    assert sum(math.isnan(value) for row in broken.rows for value in row) == 1
    assert not any(math.isnan(value) for row in out.rows for value in row)


def test_BE_1_drop_peer_zeroes_the_last_rank_only(out: Grid) -> None:
    fault = Fault("drop_peer")
    assert fault.input(out, 0, 3) is out
    assert fault.input(out, 2, 3).rows == [[0] * 4] * 6
    assert out.rows[1][1] == 11
    assert fault.output(out) is out


def test_BE_1_stale_result_gives_the_round_before(out: Grid) -> None:
    fault = Fault("stale_result")
    first, second, third = out, faults.swap_columns(out), faults.swap_row_tiles(out)
    assert fault.output(first).rows == first.rows  # nothing older is there yet
    assert fault.output(second).rows == first.rows
    assert fault.output(third).rows == second.rows


def test_stale_result_keeps_a_copy_of_an_output_that_is_written_again(out: Grid) -> None:
    fault = Fault("stale_result")
    fault.output(out)
    old = [list(row) for row in out.rows]
    out[...] = 7.0
    assert fault.output(out).rows == old


def test_without_a_fault_everything_passes_through(out: Grid) -> None:
    fault = Fault(None)
    assert not fault
    assert fault.input(out, 1, 2) is out
    assert fault.output(out) is out


@pytest.mark.parametrize("name", faults.FAULTS)
def test_every_fault_can_be_chosen_by_name(name: str) -> None:
    assert Fault(name)


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="'typo' is not a fault: swap_columns, "):
        Fault("typo")


def test_a_fault_that_could_not_be_seen_is_refused() -> None:
    with pytest.raises(ValueError, match="needs two columns"):
        faults.swap_columns(Grid([[1.0], [2.0]]))
    with pytest.raises(ValueError, match="needs two rows"):
        faults.swap_row_tiles(Grid([[1.0, 2.0]]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_BE_1_the_faults_break_real_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed; mori-bench does without it")
    out = torch.arange(24).reshape(6, 4).to(getattr(torch, dtype))
    before = out.clone()
    for name in ("swap_columns", "swap_row_tiles", "one_nan"):
        broken = Fault(name).output(out)
        assert broken.dtype == out.dtype
        assert not torch.equal(broken.float(), out.float()), name
    assert not Fault("drop_peer").input(out, 1, 2).float().any()
    assert torch.equal(out.float(), before.float())
    with pytest.raises(ValueError, match="uint8 has no NaN"):
        Fault("one_nan").output(out.float().to(torch.uint8))
