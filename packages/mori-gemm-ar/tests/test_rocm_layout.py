"""Plan and layout of the rocm target as pure integers: no kernel is compiled."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("flydsl") is None:
    pytest.skip("not installed: flydsl; pip install 'mori-gemm-ar[rocm]'", allow_module_level=True)

from mori_gemm_ar.options import MODES, resolve
from mori_gemm_ar.plan import Phase, Plan
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.support import supports, window_bytes
from mori_gemm_ar.targets.rocm.launch import Here, Launches
from mori_gemm_ar.targets.rocm.limits import DEFAULT_PULL_BLOCKS, MAX_BAND_ROWS, ONE_STAGE_BYTES
from mori_gemm_ar.targets.rocm.regions import ALIGNMENT, control_of, layout_for
from mori_gemm_ar.targets.rocm.tiles import TileShape, tile_at

N = 7168
OPTIONS = [
    {"mode": mode, **wire}
    for mode in MODES
    for wire in (
        [{}]
        if mode == "gemm-only"
        else [{}, {"gather_dtype": "fp8"}, {"gather_dtype": "fp8", "gather_transport": "sdma"}]
    )
]


def resolved(options):
    return resolve(**options, default_pull_blocks=DEFAULT_PULL_BLOCKS)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: " ".join(o.values()))
@pytest.mark.parametrize(("m_max", "world_size"), [(16384, 8), (1000, 3), (7, 8), (1, 1)])
def test_regions_are_aligned_and_do_not_overlap(options, m_max, world_size):
    layout = layout_for(m_max, N, world_size, resolved(options))
    starts = list(layout.offsets.values())
    assert starts == sorted(starts)
    assert all(start % ALIGNMENT == 0 for start in starts)
    assert layout.offsets["c"] >= control_of(world_size).nbytes
    assert layout.output_row(m_max) <= layout.nbytes
    if (
        layout.landing_row(1) != layout.landing_row(0)
        and layout.offsets["staging"] > layout.offsets["landing"]
    ):
        assert layout.landing_row(world_size) <= layout.offsets["staging"]


def test_words_of_the_control_area_do_not_overlap():
    for world_size in range(1, 9):
        control = control_of(world_size)
        used = {}
        for name in ("epoch", "arrived_due", "finished_due"):
            used[getattr(control, name)] = name
        for name in ("called", "arrived", "finished"):
            used |= {getattr(control, name) + 8 * source: name for source in range(world_size)}
        used |= {control.counters + 8 * i: "counters" for i in range(control.num_counters)}
        used |= {control.counters + control.then + 8 * i: "then" for i in range(control.num_counters)}
        assert len(used) == 3 + 3 * world_size + 2 * control.num_counters
        assert max(used) + 8 <= control.nbytes
        assert control.blocks == control.tiles(world_size)


def test_the_window_at_the_published_shape():
    """8 ranks, M=16384, N=7168: C, landing slots and output are 224 MiB each; the fp8 wires add their
    staging."""
    mib = {
        wire: window_bytes("rocm", N, 16384, 8, {"mode": "fused-sdma", **options}) / 2**20
        for wire, options in {
            "bf16": {},
            "lsa": {"gather_dtype": "fp8", "gather_transport": "lsa"},
            "sdma": {"gather_dtype": "fp8", "gather_transport": "sdma"},
        }.items()
    }
    assert 672 <= mib["bf16"] < 673
    assert 14 <= mib["lsa"] - mib["bf16"] < 14.1
    assert 112 <= mib["sdma"] - mib["bf16"] < 112.2


def launches_of(options, rank, world_size, m_max=4096):
    chosen = resolved(options)
    here = Here(1 << 40, 1 << 32, rank, 4096, 8192, 1)
    return Launches(here, layout_for(m_max, N, world_size, chosen), chosen), chosen


@pytest.mark.parametrize(("m", "world_size"), [(4096, 8), (1000, 3), (130, 2), (17, 8), (1, 4)])
@pytest.mark.parametrize("chunks", [None, 1, 3])
def test_tiles_cover_every_row_once_and_stay_in_their_chunk(m, world_size, chunks):
    for rank in range(world_size):
        launches, options = launches_of({"mode": "fused-sdma", "chunks": chunks}, rank, world_size)
        plan = Plan(Problem(m, N, 128, world_size), options, MAX_BAND_ROWS)
        for shape in (TileShape(256, 256, 2), TileShape(64, 128, 2)):
            cut = launches.slices(plan, shape)
            columns = -(-N // shape.cols)
            assert cut.bands == plan.num_chunks * cut.bands_per_chunk
            assert cut.band_rows <= shape.rows
            covered = [0] * m
            for index in range(cut.num_tiles(columns)):
                tile = tile_at(index, cut, shape, N)
                for row in range(tile.row0, tile.row0 + tile.rows):
                    covered[row] += 1
                    assert row // plan.problem.slice_rows == tile.owner
                    in_slice = row - tile.owner * plan.problem.slice_rows
                    assert in_slice // (cut.bands_per_chunk * cut.band_rows) == tile.chunk
            assert covered == [columns] * m


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda o: " ".join(o.values()))
def test_the_kernels_of_a_call_follow_the_plan(options):
    for m in (4096, 17, 0):
        for rank in range(8):
            launches, chosen = launches_of(options, rank, 8)
            plan = Plan(Problem(m, N, 128, 8), chosen, MAX_BAND_ROWS)
            phases = [launch.phase for launch in launches.after_gemm(plan)]
            skipped = {Phase.REDUCE, Phase.QUANTIZE, Phase.DEQUANTIZE}
            if plan.problem.slice_of(rank).height:
                skipped = set()
            assert [p for p in plan.phases[1:] if p in phases] == phases
            assert set(plan.phases[1:]) - set(phases) <= skipped
            assert all(launch.blocks >= 1 for launch in launches.after_gemm(plan))


def test_one_stage_up_to_a_size():
    launches, options = launches_of({"mode": "split-lsa"}, 0, 8)
    most = ONE_STAGE_BYTES // (2 * N)
    assert launches.one_stage(Plan(Problem(most, N, 128, 8), options, MAX_BAND_ROWS))
    assert not launches.one_stage(Plan(Problem(most + 1, N, 128, 8), options, MAX_BAND_ROWS))


def test_support_is_told_without_a_device():
    assert supports(n=7168, k=2048, m_max=16384, world_size=8, backend="rocm")
    assert "multiple of 8" in supports(n=7, k=2048, m_max=16, world_size=8, backend="rocm").reason
