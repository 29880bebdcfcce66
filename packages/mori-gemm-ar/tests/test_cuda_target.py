"""The cuda target without a GPU: what copy engines are told, what is refused, when a call is small."""

from __future__ import annotations

import pytest
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.bench.cuda_crossover import crossover_of
from mori_gemm_ar.options import resolve
from mori_gemm_ar.targets.cuda import limits
from mori_gemm_ar.targets.cuda.copies import Bands, Copies, Transfer
from mori_gemm_ar.targets.cuda.regions import regions_for

BASES = [(1 + rank) << 40 for rank in range(8)]


def transfers(m: int, n: int, num_ranks: int, rank: int, *, fp8: bool, band: int, lag: int) -> list[Transfer]:
    regions = regions_for(m, n, num_ranks, 128, copies=True, fp8=fp8)
    height = -(-m // num_ranks)
    start = [min(m, r * height) for r in range(num_ranks + 1)]
    blocks = -(-height // 128)
    bands = Bands(start, 128, band, -(-blocks // band), lag)
    bases = BASES[:num_ranks]
    return list(Copies(bands, rank, bases, regions, scatters=True, gathers=True, fp8=fp8).in_order())


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("m", "num_ranks"), [(1000, 2), (1000, 3), (17, 8), (4096, 8)])
def test_copies_bring_every_band_to_its_place_once(m: int, num_ranks: int, fp8: bool) -> None:
    """17 rows on 8 ranks: slices of 3, the last two without rows."""
    n = 320
    height, landed = -(-m // num_ranks), {}
    for rank in range(num_ranks):
        for transfer in transfers(m, n, num_ranks, rank, fp8=fp8, band=2, lag=1):
            assert transfer.trigger >> 40 == 1 + rank
            for dst, src, nbytes in transfer.copies:
                assert src >> 40 == 1 + rank != dst >> 40
                assert nbytes > 0
                assert (rank, dst) not in landed
                landed[rank, dst] = nbytes
    tiles = sum(-(-max(0, min(m - r * height, height)) // 128) for r in range(num_ranks))
    row_of_tiles = 2 * -(-n // 256) * 2  # half tiles of 64 rows
    scattered = (num_ranks - 1) * tiles * row_of_tiles * 64 * 128 * 2
    gathered = row_of_tiles * tiles * (64 * 128 + 64 * 4) if fp8 else m * n * 2
    assert sum(landed.values()) == scattered + (num_ranks - 1) * gathered


def test_copies_stand_in_the_order_in_which_bands_are_finished() -> None:
    """Remote bands first, my own `lag` behind; each flag once, behind its own copy."""
    found = transfers(1024, 256, 2, 0, fp8=False, band=1, lag=2)
    regions = regions_for(1024, 256, 2, 128, copies=True, fp8=False)
    ready, finished = BASES[0] + regions.flag("ready", 1), BASES[0] + regions.flag("finished")
    order = [
        ("scatter", (t.trigger - ready) // 4)
        if t.trigger < finished
        else ("gather", (t.trigger - finished) // 4)
        for t in found
    ]
    assert order == [
        *[("scatter", 0), ("scatter", 1), ("scatter", 2), ("gather", 0)],
        *[("scatter", 3), ("gather", 1), ("gather", 2), ("gather", 3)],
    ]
    flags = [flag for t in found for flag in t.flags]
    assert len(set(flags)) == len(flags)
    assert all(flag >> 40 == 2 for flag in flags)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mode": "fused-sdma", "fuse_reduce_push": True}, "the epilogue sums and sends each tile"),
        ({"mode": "split-sdma", "fuse_reduce_push": True, "gather_bands": 2}, "start when it ends"),
        ({"mode": "fused-lsa", "pull_blocks": 8}, "it is split-lsa that pulls"),
        ({"mode": "fused-lsa", "gather_dtype": "fp8", "gather_scale": "row"}, "before the maximum"),
        ({"mode": "split-lsa", "small_m": "auto"}, "only a fused mode"),
        ({"mode": "fused-lsa", "small_m_below": 8}, "without small_m"),
        ({"mode": "fused-lsa", "gather_scale": "row"}, "only with gather_dtype='fp8'"),
    ],
)
def test_GA_7_what_cannot_be_honoured_is_refused_with_the_reason(
    options: dict[str, object], reason: str
) -> None:
    answer = GemmAllReduce.supports(n=256, k=256, m_max=1024, world_size=2, backend="cuda", **options)
    assert not answer
    assert reason in answer.reason


def test_options_that_mean_something_here_are_taken() -> None:
    for options in (
        {"mode": "split-lsa", "gather_dtype": "fp8", "gather_scale": "row", "fuse_quantize": True},
        {"mode": "split-lsa", "pull_blocks": 8},
        {"mode": "fused-lsa", "gather_dtype": "fp8", "gather_scale": "1x128"},
        {"mode": "fused-lsa", "small_m": "auto", "small_m_below": 8},
    ):
        assert GemmAllReduce.supports(n=256, k=256, m_max=1024, world_size=2, backend="cuda", **options), (
            options
        )
    assert resolve(mode="fused-lsa", gather_dtype="fp8", default_gather_scale="1x128").gather_scale == "1x128"
    assert not GemmAllReduce.supports(
        n=256, k=256, m_max=1024, world_size=2, mode="split-lsa", gather_dtype="fp8", gather_scale="1x128"
    )


def test_small_calls_are_those_below_the_limit() -> None:
    auto = resolve(mode="fused-lsa", small_m="auto")
    assert limits.small_m_way(limits.SMALL_M_BELOW - 1, 2, auto) == "one-stage"
    assert limits.small_m_way(limits.SMALL_M_BELOW, 2, auto) is None
    assert limits.small_m_way(100, 8, auto) == "two-stage"
    assert limits.small_m_way(16, 8, auto) == "one-stage"
    assert limits.small_m_way(16, 1, auto) is None
    named = resolve(mode="fused-lsa", small_m="two-stage", small_m_below=10)
    assert [limits.small_m_way(m, 2, named) for m in (9, 10)] == ["two-stage", None]
    assert limits.small_m_way(1, 2, resolve(mode="fused-lsa")) is None
    assert GemmAllReduce.profitable(512, backend="cuda")
    assert not GemmAllReduce.profitable(511, backend="cuda", gather_dtype="fp8")


def test_a_crossover_is_the_last_change() -> None:
    assert crossover_of([(16, False), (64, True), (256, False), (512, True), (1024, True)]) == "from M=512 on"
    assert crossover_of([(16, True), (64, True)]) == "from M=16 on (the least that was measured)"
    assert crossover_of([(16, True), (64, False)]) == "at no end of this range: not at M=64"
