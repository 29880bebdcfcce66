"""Regions do not overlap, hold what is put into them, and lie where they lie whatever M a call has."""

import itertools

import pytest
from mori_gemm_ar.layout import ALIGNMENT, layout_for
from mori_gemm_ar.options import GATHER_DTYPES, GATHER_TRANSPORTS, MAX_PARTS, MODES, resolve
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.problem import Problem

CHOICES = [
    {"mode": mode, "gather_dtype": dtype, "gather_transport": transport}
    for mode, dtype, transport in itertools.product(MODES[1:], GATHER_DTYPES, GATHER_TRANSPORTS)
] + [{"mode": "gemm-only"}]
SIZES = [(1, 128, 1), (17, 320, 8), (1000, 7168, 8), (129, 130, 5), (4096, 1, 3)]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(c.values()))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_regions_are_aligned_and_do_not_overlap(choice, size):
    layout = layout_for(*size, resolve(**choice))
    regions = list(layout.regions().values())
    assert all(region.offset_bytes % ALIGNMENT == 0 for region in regions)
    assert all(a.end_bytes <= b.offset_bytes for a, b in itertools.pairwise(regions))
    assert layout.nbytes == layout.output.end_bytes


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(c.values()))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_flag_is_its_own_and_every_row_lies_in_its_region(choice, size):
    m_max, n, num_ranks = size
    layout = layout_for(m_max, n, num_ranks, resolve(**choice))
    ranks, parts = range(num_ranks), range(MAX_PARTS)
    flags = [layout.done_flag(r, p) for r in ranks for p in parts]
    flags += [layout.arrived_flag(r, p) for r in ranks for p in parts]
    flags += [layout.pushed_flag(p) for p in parts]
    flags += [layout.gathered_flag(r, p) for r in ranks for p in parts]
    flags += [layout.ready_flag(r) for r in ranks]
    flags += [
        layout.stamp(leg, r, p) + half for leg in (0, 1) for r in ranks for p in parts for half in (0, 8)
    ]
    assert len(set(flags)) == len(flags)
    assert all(flag % 8 == 0 for flag in flags)
    assert max(flags) + 8 <= layout.stamps.end_bytes
    last = layout.slice_rows - 1
    ends = {
        "c": layout.c_row(m_max),
        "output": layout.output_row(m_max),
        "landing": layout.landing_row(num_ranks - 1, last) + n * 2,
    }
    if layout.staging.nbytes > layout.slice_rows * n * 2:
        ends["staging"] = layout.staging_row(num_ranks - 1, last) + n
        ends["scales"] = layout.scale_row(num_ranks - 1, last) + 4
    for name, end in ends.items():
        region = layout.regions()[name]
        assert region.nbytes == 0 or end == region.end_bytes


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_slots_sized_for_m_max_hold_every_smaller_m(size):
    m_max, n, num_ranks = size
    layout = layout_for(m_max, n, num_ranks, resolve())
    for m in {0, 1, m_max // 3, m_max - 1, m_max}:
        plan = Plan(Problem(m, n, 128, num_ranks), resolve(), 64)
        assert plan.problem.slice_rows <= layout.slice_rows
        assert plan.num_chunks <= MAX_PARTS
        assert plan.num_parts <= MAX_PARTS


def test_window_of_the_model_shape_is_near_the_published_sizes():
    mib = {
        name: layout_for(16384, 7168, 8, resolve(mode="fused-sdma", **options)).nbytes / 2**20
        for name, options in {
            "bf16": {},
            "fp8 lsa": {"gather_dtype": "fp8"},
            "fp8 sdma": {"gather_dtype": "fp8", "gather_transport": "sdma"},
        }.items()
    }
    assert 672 <= mib["bf16"] <= 700  # three times 224 MiB, and flags
    assert mib["bf16"] + 14 <= mib["fp8 lsa"] <= 700
    assert mib["bf16"] + 112 <= mib["fp8 sdma"] <= 812
    lsa = layout_for(16384, 7168, 8, resolve(mode="fused-lsa"))
    assert lsa.c.nbytes == 0
    assert lsa.staging.nbytes == 28 * 2**20
