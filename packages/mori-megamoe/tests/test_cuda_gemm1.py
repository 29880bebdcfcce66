"""The cuda target's GEMM1: sums against float64, the bytes of the epilogue, and what they must not depend on.

cpu   the kernel's source compiled for the CPU (cuda_emulator.py): every address, barrier and fragment as
      written, matrix instructions exact. So it shows what is computed, not how the hardware rounds nor how
      long it takes
cuda  on a GPU
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from mori_megamoe import mx
from mori_megamoe.targets.cuda.tiles import HostTile

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import Problem, Results, exact_sums, relative, run, weights_of

on_both = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
only_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu(1))])
bodies = pytest.mark.parametrize("body", ["R", "A"])

# Against float64 of the exact products. CPU: sums are exact there, so R has only what rebasing rows loses and
# A only the rounding of fp32. GPU (the prototype on an H200): R 5.3e-5 on normal data and 1.8e-4 on outliers
# and heavy tails, A 4.4e-8 and 2.1e-7.
MOST_ERROR = {
    ("cpu", "R", False): 2e-5,
    ("cpu", "A", False): 1e-7,
    ("cuda", "R", False): 1e-4,
    ("cuda", "A", False): 3e-7,
    ("cuda", "R", True): 5e-4,
    ("cuda", "A", True): 2e-6,
}


def check(problem: Problem, device: str, grid: int = 2) -> None:
    weights, exact = weights_of(problem, device)
    inputs = problem.inputs()
    got = run(problem, weights, inputs, device, grid=grid)
    real = problem.real
    error = relative(got.sums[real], exact_sums(problem, inputs, exact)[real])
    assert error <= MOST_ERROR[device, problem.body, problem.tails]
    check_bytes(problem, device, got, real)


def check_bytes(problem: Problem, device: str, got: Results, real: torch.Tensor) -> None:
    """The epilogue is exact: bytes follow from the sums. exp2 is an approximation on a GPU, so a code may
    differ by a rounding there now and then."""
    codes, scales = got.wanted_bytes(problem.limit)
    out, plain, shuffled = got.buffers.out, got.buffers.scales, got.buffers.shuffled_scales
    form = mx.ActivationScales(problem.rows, problem.inter_dim // 32)
    assert torch.equal(form.unshuffle(shuffled)[real], plain[real])
    if device == "cpu":
        assert torch.equal(out[real], codes[real])
        assert torch.equal(plain[real], scales[real].to(torch.uint8))
    else:
        assert int((out != codes)[real].sum()) <= 2e-4 * int(real.sum()) * problem.inter_dim
        assert int((plain != scales)[real].sum()) <= 2


@on_both
@bodies
def test_sums_and_bytes_with_empty_experts_and_ragged_tiles(device: str, body: str) -> None:
    """Four experts, one without rows, one with a single row, one with a tile and a bit."""
    check(Problem([1, 0, 130, 5], body=body), device)


@on_both
@bodies
def test_more_weights_and_k_than_one_item(device: str, body: str) -> None:
    """Two pairs of weight blocks and three trips round the stages; two clusters share the items."""
    check(Problem([3], inter_dim=512, model_dim=768, body=body, limit=0.0), device, grid=4)


@on_both
@bodies
@pytest.mark.parametrize("tile_rows", [64, 32])
def test_smaller_tiles_give_the_same_bits(device: str, body: str, tile_rows: int) -> None:
    """A row's sums and codes do not depend on how many rows are multiplied at a time."""
    counts, found = [70, 0, 1], []
    for rows in (128, tile_rows):
        problem = Problem(counts, tile_rows=rows, body=body)
        check(problem, device)
        weights, _ = weights_of(problem, device)
        real = problem.real
        inputs = Problem(counts, body=body).inputs()
        here = tuple(torch.zeros(problem.rows, *part.shape[1:], dtype=part.dtype) for part in inputs)
        for part, given in zip(here, inputs, strict=True):
            part[real] = given[Problem(counts, body=body).real]
        found.append((real, run(problem, weights, (here[0], here[1]), device)))
    (wide_real, wide), (real, small) = found
    assert torch.equal(wide.sums[wide_real], small.sums[real])
    assert torch.equal(wide.buffers.out[wide_real], small.buffers.out[real])


@on_both
@bodies
def test_rows_come_from_where_the_plan_says(device: str, body: str) -> None:
    """Inputs of the two tiles swapped: outputs are, and nothing else changes."""
    problem = Problem([128, 128], body=body)
    weights, _ = weights_of(problem, device)
    inputs = problem.inputs()
    swapped = tuple(torch.cat([part[128:], part[:128]]) for part in inputs)
    plain = run(problem, weights, inputs, device)
    tiles = [HostTile(0, 0, 128), HostTile(1, 128, 0)]
    moved = run(problem, weights, (swapped[0], swapped[1]), device, tiles=tiles)
    assert torch.equal(plain.sums, moved.sums)
    assert torch.equal(plain.buffers.out, moved.buffers.out)


@on_both
@bodies
def test_a_rows_bits_do_not_depend_on_its_place(device: str, body: str) -> None:
    """Rolled by 37 rows, and with other rows beside it: the same bits."""
    problem = Problem([128], body=body)
    weights, _ = weights_of(problem, device)
    inputs = problem.inputs()
    plain = run(problem, weights, inputs, device)
    rolled = run(problem, weights, (inputs[0].roll(37, 0), inputs[1].roll(37, 0)), device)
    assert torch.equal(plain.sums.roll(37, 0), rolled.sums)
    assert torch.equal(plain.buffers.out.roll(37, 0), rolled.buffers.out)


@only_gpu
@bodies
@pytest.mark.parametrize("tails", [False, True])
@pytest.mark.parametrize("shape", [(7168, 3072), (4096, 2048), (256, 256), (768, 1280)])
def test_sums_of_a_whole_layer(device: str, body: str, tails: bool, shape: tuple[int, int]) -> None:
    """v4_pro, flash, the smallest, and an odd one."""
    check(Problem([180, 0, 77], *shape, body=body, tails=tails), device)


@only_gpu
@bodies
def test_repeats_give_the_same_bits(device: str, body: str) -> None:
    problem = Problem([300, 20], 1024, 512, body=body)
    weights, _ = weights_of(problem, device)
    inputs = problem.inputs()
    first = run(problem, weights, inputs, device)
    for _ in range(5):
        again = run(problem, weights, inputs, device)
        assert torch.equal(first.buffers.out[problem.real], again.buffers.out[problem.real])
