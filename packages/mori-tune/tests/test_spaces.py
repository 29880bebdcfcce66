"""Spaces: the grids have exactly the sizes they are known by, and no candidate breaks a rule."""

from __future__ import annotations

import pytest
from mori_tune import (
    GEMM_AR,
    GemmArShape,
    Hardware,
    SpaceError,
    ep_space,
    gemm_ar_space,
    hardware_of,
    split_workers,
)
from mori_tune.device import Device, host_device, model_name
from mori_tune.spaces.gemm_ar import MODES, tile_of
from mori_tune.spaces.space import Candidate

# compute units: inter full, inter quick, intra full, intra quick
GRID_SIZES = {304: (105, 42, 387, 15), 256: (90, 36, 315, 12), 132: (90, 36, 126, 12), 80: (75, 30, 63, 9)}
CUDA = Hardware(132, lanes=32, shared_bytes=232_448, loader_bytes=4096)


@pytest.mark.parametrize("units", GRID_SIZES)
def test_ep_grids_have_their_exact_sizes(units: int) -> None:
    hardware = Hardware(units, lanes=64)
    spaces = [(nodes, scope) for nodes in ("inter", "intra") for scope in ("full", "quick")]
    found = tuple(len(ep_space(hardware, nodes=nodes).candidates(scope)) for nodes, scope in spaces)
    assert found == GRID_SIZES[units]


def test_ep_grids_contain_what_is_known_of_them() -> None:
    inter = ep_space(Hardware(304, lanes=64), nodes="inter").candidates()
    assert sorted({c["block_num"] for c in inter}) == [8, 16, 32, 64, 128, 256, 304]
    assert {c["rdma_block_num"] for c in inter if c["block_num"] == 32} == {8, 16, 21}
    assert {c["rdma_block_num"] for c in inter if c["block_num"] == 8} == {2, 4, 5}
    intra = ep_space(Hardware(304, lanes=64), nodes="intra").candidates()
    assert {c["rdma_block_num"] for c in intra} == {0}
    assert {223, 225, 252, 255, 257, 304} <= {c["block_num"] for c in intra}
    assert len(set(inter)) == len(inter)
    assert len(set(intra)) == len(intra)


@pytest.mark.parametrize("units", [1, 7, 8, 31, 33, 64, 304, 1024])
@pytest.mark.parametrize("nodes", ["intra", "inter"])
def test_no_ep_candidate_oversubscribes_or_starves_a_side(nodes: str, units: int) -> None:
    space = ep_space(Hardware(units, lanes=64), nodes=nodes)
    quick, full = set(space.candidates("quick")), set(space.candidates("full"))
    assert quick <= full or units < 32
    for c in full:
        assert int(c["block_num"]) <= units
        assert int(c["warp_per_block"]) * 64 <= 1024
        assert 0 <= int(c["rdma_block_num"]) < int(c["block_num"])


def test_TU_5_too_many_threads_and_blocks_are_refused_with_the_numbers() -> None:
    space = ep_space(Hardware(132, lanes=64), nodes="intra")
    threads = Candidate.of({"block_num": 32, "rdma_block_num": 0, "warp_per_block": 17})
    assert "1088 threads" in str(space.why_invalid(threads))
    blocks = Candidate.of({"block_num": 133, "rdma_block_num": 0, "warp_per_block": 16})
    assert "133 blocks on 132" in str(space.why_invalid(blocks))
    other = Candidate.of({"block_num": 32})
    assert "has parameters ['block_num']" in str(space.why_invalid(other))


def test_TU_5_a_tile_is_a_whole_number_of_loader_steps() -> None:
    shape = GemmArShape(4096, 8, "gemm-only", "rocm", element_bytes=2)
    space = gemm_ar_space(Hardware(256, lanes=64, shared_bytes=163_840, loader_bytes=4096), shape)
    reason = str(space.why_invalid(Candidate.of({"tile": "112x128x64"})))
    assert "14336" in reason
    assert "4096" in reason
    assert "2048" in reason
    assert space.why_invalid(Candidate.of({"tile": "128x128x64"})) is None


def test_TU_5_no_side_of_a_kernel_is_left_without_workers() -> None:
    for total in (64, 132, 256, 304):
        communicating, computing = split_workers(total)
        assert communicating >= 1
        assert computing >= 1
        assert communicating + computing == total
    with pytest.raises(SpaceError, match=r"132 communicating workers of 132 in total leave 0"):
        split_workers(132, 132)
    shape = GemmArShape(4096, 2, "fused-lsa", "rocm", overlapped=True)
    space = gemm_ar_space(Hardware(128, lanes=64, shared_bytes=163_840, loader_bytes=4096), shape)
    refused = dict(space.refused())
    assert all(int(c["reduce_blocks"]) < 128 for c in space.candidates())
    assert any("128 communicating workers of 128" in reason for reason in refused.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gather", ["bf16", "fp8"])
@pytest.mark.parametrize("transport", [None, "lsa", "sdma"])
@pytest.mark.parametrize("backend", ["host", "cuda", "rocm"])
def test_gemm_ar_spaces_hold_only_what_the_mode_reads(
    mode: str, gather: str, transport: str | None, backend: str
) -> None:
    """An option that the op would ignore is an error there, and would measure the same thing twice here."""
    shape = GemmArShape(4096, 2, mode, backend, gather, transport)
    hardware = hardware_of(Device(backend, "sm_90" if backend == "cuda" else "gfx950", "x", 132))
    space = gemm_ar_space(hardware, shape)
    names = {p.name for p in space.parameters}
    by_lsa = mode != "gemm-only" and (transport or "lsa") == "lsa" and shape.transport == "lsa"
    rocm, by_bands = backend == "rocm", backend == "cuda" and mode.startswith("fused")
    pushes = by_bands and mode == "fused-lsa" and by_lsa
    assert ("tile" in names) == rocm
    assert ("chunks" in names) == (mode == "fused-sdma" and backend != "cuda")
    assert ("pull_blocks" in names) == (by_lsa and (backend != "cuda" or mode == "split-lsa"))
    assert ("gather_bands" in names) == (rocm and mode != "gemm-only" and not by_lsa and gather == "bf16")
    queues = mode != "gemm-only" and (mode.endswith("sdma") or not by_lsa)
    assert ("sdma_queues" in names) == (rocm and queues)
    assert ("band_rows" in names) == by_bands
    assert ("lag" in names) == pushes
    assert names <= set(GEMM_AR.mode_params)
    assert 1 <= len(space.candidates("quick")) <= len(space.candidates("full")) <= 700
    assert set(space.candidates("quick")) <= set(space.candidates("full"))


@pytest.mark.parametrize("m", [4096, 8192, 16384, 1024, 17])
def test_a_sweep_on_cuda_is_short_and_measures_nothing_twice(m: int) -> None:
    """fused-sdma with fp8 had 480 candidates there, most of which the kernel could not tell apart."""
    for mode in ("fused-lsa", "fused-sdma"):
        for gather in ("bf16", "fp8"):
            shape = GemmArShape(m, 2, mode, "cuda", gather)
            candidates = gemm_ar_space(CUDA, shape).candidates()
            assert 1 <= len(candidates) <= 12
            ways = set()
            for (
                c
            ) in candidates:  # as the kernel would have it: bands within the slice, a lag within the bands
                rows = min(int(c["band_rows"]), shape.slice_rows)
                ways.add((rows, min(int(c.as_dict().get("lag", 0)), -(-shape.slice_rows // rows))))
            assert len(ways) == len(candidates)


def test_gemm_ar_finished_rows_travel_as_the_op_chooses() -> None:
    chosen = {mode: GemmArShape(1, 2, mode, "host").transport for mode in MODES}
    sdma = {"split-sdma": "sdma", "fused-sdma": "sdma"}
    assert chosen == {"gemm-only": None, **sdma, "split-lsa": "lsa", "fused-lsa": "lsa"}
    assert GemmArShape(1, 2, "fused-sdma", "host", "fp8").transport == "lsa"


@pytest.mark.parametrize("m", [4096, 8192, 15360, 16384, 1, 129])
def test_gemm_ar_chunks_always_divide_the_bands(m: int) -> None:
    shape = GemmArShape(m, 8, "fused-sdma", "host")
    for c in gemm_ar_space(CUDA, shape).candidates():
        assert shape.num_bands(c.as_dict()) % int(c["chunks"]) == 0


def test_unknown_words_are_refused_by_name() -> None:
    space = ep_space(CUDA, nodes="intra")
    with pytest.raises(SpaceError, match="fast"):
        space.candidates("fast")
    with pytest.raises(SpaceError, match="both"):
        ep_space(CUDA, nodes="both")
    with pytest.raises(SpaceError, match="fused-nvls"):
        gemm_ar_space(CUDA, GemmArShape(1, 2, "fused-nvls", "cuda"))
    with pytest.raises(SpaceError, match="128x"):
        tile_of("128x")
    with pytest.raises(SpaceError, match="gfx1100"):
        hardware_of(Device("rocm", "gfx1100", "w7900", 96))


def test_devices_are_named_as_rule_files_name_them() -> None:
    names = {"AMD Instinct MI300X": "mi300x", "AMD Instinct MI355X OAM": "mi355x", "NVIDIA H200": "h200"}
    names |= {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA A100-SXM4-80GB": "a100"}
    assert {name: model_name(name) for name in names} == names
    assert hardware_of(Device.parse("sm_90/h200/132")).lanes == 32
    assert hardware_of(Device.parse("gfx942/mi308x/80")).compute_units == 80
    assert hardware_of(host_device(4)).compute_units == 4
