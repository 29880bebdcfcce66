"""Plans cover every row exactly once, at any shape, and do not let the mode decide how the GEMM is cut."""

import itertools

import pytest
from mori_gemm_ar.options import MODES, resolve
from mori_gemm_ar.plan import Phase, Plan, split
from mori_gemm_ar.problem import Problem, Rows

ROWS = (0, 1, 2, 5, 17, 64, 65, 129, 255, 513, 1000, 4096, 15360)
RANKS = (1, 2, 3, 5, 7, 8, 12)


def plan(m, num_ranks, band=64, **options):
    return Plan(Problem(m, 256, 128, num_ranks), resolve(**options), band)


def covered(runs):
    """The rows of runs, in order."""
    return list(itertools.chain.from_iterable(range(run.start, run.stop) for run in runs))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("m", ROWS)
def test_slices_bands_chunks_and_parts_cover_every_row_once(m, num_ranks):
    for options in (
        {"mode": "fused-sdma"},
        {"mode": "fused-sdma", "chunks": 3},
        {"mode": "split-sdma", "sdma_queues": 3},
        {"mode": "fused-lsa", "pull_blocks": 7},
        {"mode": "split-sdma", "fuse_reduce_push": True, "gather_bands": 5},
    ):
        p = plan(m, num_ranks, **options)
        slices = [p.problem.slice_of(rank) for rank in range(num_ranks)]
        assert covered(slices) == list(range(m))
        for owner, rows in enumerate(slices):
            for runs in (p.bands(owner), p.chunks(owner), p.parts(owner), p.pull_blocks(owner)):
                assert covered(runs) == list(range(rows.start, rows.stop))
            assert len(p.bands(owner)) == p.num_bands
            assert len(p.chunks(owner)) == p.num_chunks
            assert len(p.parts(owner)) == p.num_parts
            assert all(run.height <= 64 for run in p.bands(owner))


@pytest.mark.parametrize("num_ranks", RANKS)
def test_a_chunk_is_a_run_of_whole_bands(num_ranks):
    for m, most in itertools.product(ROWS, (1, 2, 3, 8)):
        p = plan(m, num_ranks, chunks=most)
        assert p.num_chunks <= most
        for owner in range(num_ranks):
            bands, chunks = p.bands(owner), p.chunks(owner)
            for i, chunk in enumerate(chunks):
                assert covered(bands[i * p.bands_per_chunk : (i + 1) * p.bands_per_chunk]) == covered([chunk])


def test_chunks_are_the_largest_divisor_not_above_the_limit():
    assert [plan(8 * bands * 64, 8).num_chunks for bands in (1, 2, 5, 7, 8, 12, 16, 20)] == [
        1,
        2,
        5,
        7,
        8,
        6,
        8,
        5,
    ]
    assert plan(8 * 64 * 11, 8).num_bands == 12  # a prime would leave one chunk
    assert plan(8 * 64 * 11, 8).num_chunks == 6
    assert plan(8 * 64 * 8, 8, chunks=3).num_chunks == 2


@pytest.mark.parametrize("m", ROWS)
def test_bands_do_not_depend_on_the_mode_or_on_any_option(m):
    want = [plan(m, 8).bands(owner) for owner in range(8)]
    for options in ({"chunks": 1}, {"gather_dtype": "fp8"}, *({"mode": mode} for mode in MODES)):
        assert [plan(m, 8, **options).bands(owner) for owner in range(8)] == want


def test_remote_rows_come_first_and_no_two_ranks_begin_alike():
    p = plan(1000, 8)
    orders = [list(p.owners_from(rank)) for rank in range(8)]
    assert orders[0] == [1, 2, 3, 4, 5, 6, 7, 0]
    assert all(sorted(order) == list(range(8)) and order[-1] == rank for rank, order in enumerate(orders))
    assert len({order[0] for order in orders}) == 8


def test_phases_of_every_mode():
    def phases(**options):
        return " ".join(plan(1000, 8, **options).phases)

    assert phases(mode="gemm-only") == "gemm"
    assert phases(mode="split-sdma") == "gemm scatter drain reduce gather"
    assert phases(mode="fused-sdma") == "gemm drain reduce gather"
    assert phases(mode="split-lsa") == "gemm drain reduce pull"
    assert phases(mode="fused-lsa") == "gemm drain reduce pull"
    assert phases(gather_dtype="fp8") == "gemm drain reduce quantize pull"
    assert phases(gather_dtype="fp8", fuse_quantize=True) == "gemm drain reduce pull"
    assert (
        phases(gather_dtype="fp8", gather_transport="sdma") == "gemm drain reduce quantize gather dequantize"
    )
    assert Phase.GEMM == "gemm"


def test_split_gives_equal_runs_and_empty_ones_at_the_end():
    assert split(Rows(10, 20), 10, 3) == ((10, 14), (14, 18), (18, 20))
    assert split(Rows(10, 12), 10, 3) == ((10, 12), (12, 12), (12, 12))
    assert split(Rows(0, 0), 0, 2) == ((0, 0), (0, 0))


def test_bytes_and_flops():
    problem = Problem(1000, 7168, 2048, 8)
    assert problem.flops == 2 * 1000 * 7168 * 2048
    assert problem.scatter_bytes(0) == 875 * 7168 * 2
    assert problem.gather_bytes(0, "bf16") == 7 * 125 * 7168 * 2
    assert problem.gather_bytes(0, "fp8") == 7 * 125 * (7168 + 4)
    assert sum(Problem(17, 128, 128, 8).slice_of(rank).height for rank in range(8)) == 17
    assert Problem(17, 128, 128, 8).slice_of(7).height == 0
