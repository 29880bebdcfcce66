"""The way back on the CPU's emulation: GEMM2 with its epilogue, and combine; then the whole layer on two
ranks, from tokens to output, by kernels alone.

Sums. A GPU adds in another order than the host target, so bytes can only be compared where no order rounds:
tokens are small whole numbers and a row of w2 has few values, in one block. Then every sum is exact, and the
layer's bytes are the host target's: `reference.layer`. Body R reads hidden rows rebased to one scale a row,
which may cost a bit; its reference does the same."""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from mori_megamoe import arithmetic, mx, reference
from mori_megamoe.problem import Problem
from mori_megamoe.targets.cuda import params
from mori_megamoe.targets.cuda.back import Back
from mori_megamoe.targets.cuda.faults import error_of
from mori_megamoe.targets.cuda.layout import Shape, offsets_of
from mori_megamoe.targets.cuda.variants import BODIES, PARTIALS
from mori_megamoe.targets.cuda.weights import PreparedWeights, prepare_back_weights, prepare_weights
from mori_megamoe.testing import wrong_rows
from mori_megamoe.weights import LogicalWeights, StoredWeights, shuffle_weights, w2_of
from mori_shmem.errors import PeerTimeout, UnsupportedShape

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import cpu_maps, exact_weights, operand_rows, relative
from cuda_emulator import Library
from cuda_ranks import RankCall, Ranks, random_call

LIMIT = 10.0
bodies = pytest.mark.parametrize("body", ["R", "A"])
formats = pytest.mark.parametrize("partials", ["bf16", "fp8_blockwise_1x32"])


@functools.cache
def back_library(body: str, tile_rows: int, partials: str) -> Library:
    """GEMM2; it writes its sums too."""
    flags = (f"-DBODY={BODIES[body]}", f"-DTILE_ROWS={tile_rows}", f"-DPARTIALS={PARTIALS[partials]}")
    return Library("gemm2.cu", (*flags, "-DSUMS=1"), {"gemm2": ["Gemm1Maps", "Gemm1Params", "BackParams"]})


@functools.cache
def hidden_library(body: str) -> Library:
    flags = (f"-DBODY={BODIES[body]}",)
    return Library("hidden.cu", flags, {"hidden": ["HiddenParams", "RowsParams"]})


@functools.cache
def combine_library(partials: str) -> Library:
    return Library("combine.cu", (f"-DPARTIALS={PARTIALS[partials]}",), {"combine": ["CombineParams"]})


class LayerRanks(Ranks):
    """All ranks of a layer, with the kernels of the way back."""

    def __init__(self, shape: Shape, *, timeout_s: float = 60.0) -> None:
        super().__init__(shape, timeout_s=timeout_s)
        self.hidden = [self.buffers(rank) for rank in range(shape.world_size)]
        self.backs = [Back.empty(*pair) for pair in zip(self.places, self.hidden, strict=True)]
        self.sums = [
            torch.full((shape.rows, 512 * shape.back_pairs), torch.nan) for _ in range(shape.world_size)
        ]

    def stage2(self, rank: int, weights: PreparedWeights, grid: int = 4) -> None:
        shape, back = self.shape, self.backs[rank]
        hidden = hidden_library(shape.body).of_rank(rank)
        hidden.run("hidden", list(back.hidden_params()), 3, 256)
        given, where = back.gemm2_params(weights)
        given.sums = self.sums[rank].data_ptr()
        maps = cpu_maps(shape.body, back.buffers, shape.tile_rows)
        library = back_library(shape.body, shape.tile_rows, shape.partials).of_rank(rank)
        library.run("gemm2", [maps, given, where], grid, 384)

    def combine(self, rank: int, call: RankCall, grid: int = 3) -> torch.Tensor:
        back = self.backs[rank]
        given = back.combine_params()
        given.ids, given.tokens = call.ids.data_ptr(), len(call.ids)
        combine_library(self.shape.partials).of_rank(rank).run("combine", [given], grid, 256)
        return back.output[: len(call.ids)]


def stored_rows(ranks: LayerRanks, rank: int) -> torch.Tensor:
    """[routes, partial_bytes] uint8: what came back to a rank."""
    shape, (offsets, _) = ranks.shape, offsets_of(ranks.shape)
    part = ranks.parts[rank][offsets["partials"] :][: shape.max_routes * shape.partial_bytes]
    return part.view(shape.max_routes, shape.partial_bytes)


def one_nan(row: torch.Tensor, partials: str) -> torch.Tensor:
    """Of bf16, a NaN has many bit patterns."""
    return row if partials != "bf16" else row.clone().view(torch.bfloat16).float().nan_to_num(nan=12345.0)


# ---- problems whose sums are exact ----


def problem_of(shape: Shape) -> Problem:
    sizes = (shape.model_dim, shape.inter_dim, shape.num_experts, shape.topk, shape.world_size)
    return Problem(*sizes, shape.max_tokens, LIMIT, shape.partials)


def whole_call(shape: Shape, tokens: int, seed: int) -> RankCall:
    """Tokens of -2 .. 2 in eighths; a tenth of the slots names no expert."""
    call = random_call(shape, tokens, seed)
    call.x.copy_((call.x.float() * 1.3).round().clamp(-2, 2) / 8)
    return call


def logical_weights(shape: Shape, *, sparse: bool, seed: int = 5) -> LogicalWeights:
    """Of all experts. sparse: a row of w2 has four values, all in one block of 32."""
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(shape.num_experts, 2 * shape.inter_dim, shape.model_dim, generator=generator)
    codes, scales = mx.quantize_weight(w1 * shape.model_dim**-0.25)
    if not sparse:
        w2 = torch.randn(shape.num_experts, shape.model_dim, shape.inter_dim, generator=generator)
        return LogicalWeights(codes, scales, *mx.quantize_weight(w2 * shape.inter_dim**-0.25))
    w2 = torch.zeros(shape.num_experts, shape.model_dim, shape.inter_dim // 32, 32)
    for expert in w2:
        for row in expert:
            block = int(torch.randint(len(row), (), generator=generator))
            at = torch.randperm(32, generator=generator)[:4]
            row[block, at] = torch.randint(0, 2, (4,), generator=generator) * 2.0 - 1
    return LogicalWeights(codes, scales, *mx.quantize_weight(w2.flatten(-2)))


def of_rank(shape: Shape, weights: LogicalWeights, rank: int) -> StoredWeights:
    mine = slice(rank * shape.experts, (rank + 1) * shape.experts)
    return shuffle_weights(LogicalWeights(*[part[mine] for part in weights]))


def prepared(shape: Shape, stored: StoredWeights) -> tuple[PreparedWeights, PreparedWeights]:
    sizes = {"model_dim": shape.model_dim, "inter_dim": shape.inter_dim, "body": shape.body}
    return (
        prepare_weights(stored.w1, stored.w1_scale, **sizes),
        prepare_back_weights(stored.w2, stored.w2_scale, **sizes),
    )


def matmul_of(body: str) -> object:
    """arithmetic.matmul on rows as the body reads them, all of it exact but for the last rounding."""

    def matmul(codes: torch.Tensor, scales: torch.Tensor, w: arithmetic.Matrix) -> torch.Tensor:
        rows, largest = operand_rows(body, codes, scales)
        x = rows.double() if largest is None else mx.decode_e4m3(rows, torch.float64)
        exact = x @ mx.rules.scaled(w.values, w.factors).T
        return (exact if largest is None else exact * mx.decode_e8m0(largest, torch.float64)[:, None]).float()

    return matmul


def run_layer(
    ranks: LayerRanks,
    calls: Sequence[RankCall],
    weights: Sequence[tuple[PreparedWeights, PreparedWeights]],
    wait: str,
    delays: random.Random,
) -> list[torch.Tensor]:
    """One call of the whole layer on all ranks. wait "never": the baseline."""

    def job(rank: int) -> None:
        time.sleep(delays.random() * 0.05)
        first, second = weights[rank]
        ranks.prepare(rank, calls[rank])
        if wait == "never":
            ranks.dispatch(rank, calls[rank])
            ranks.gemm1(rank, first, ranks.hidden[rank], LIMIT)
        else:
            ranks.stage1(rank, calls[rank], first, ranks.hidden[rank], LIMIT, wait)
        ranks.stage2(rank, second)
        ranks.combine(rank, calls[rank])

    ranks.each(job, delays)
    for rank in range(ranks.shape.world_size):
        assert ranks.fault(rank)["code"] == 0, ranks.fault(rank)
    return [back.output[: len(call.ids)].clone() for back, call in zip(ranks.backs, calls, strict=True)]


# ---- tests ----


@bodies
@formats
def test_the_layers_bytes_are_the_host_targets(
    body: str, partials: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; an odd number of 256 columns; two calls through the same memory, in the second a rank has
    no tokens. Ids of no expert add nothing, and what lay in the way of rows before does not matter."""
    shape = Shape(2, 768, 256, 4, topk=2, max_tokens=16, body=body, tile_rows=32, partials=partials)
    logical = logical_weights(shape, sparse=True)
    stored = [of_rank(shape, logical, rank) for rank in range(2)]
    weights = [prepared(shape, part) for part in stored]
    ranks = LayerRanks(shape)
    for rank in range(2):
        stored_rows(ranks, rank).fill_(0xFF)  # NaN
    for number, (tokens, wait) in enumerate([((16, 5), "signals"), ((0, 11), "never")]):
        calls = [whole_call(shape, n, 10 * number + rank) for rank, n in enumerate(tokens)]
        got = run_layer(ranks, calls, weights, wait, random.Random(number))
        inputs = [reference.RankInput(call.x, call.weights, call.ids) for call in calls]
        with monkeypatch.context() as patch:
            if body == "R":
                patch.setattr(arithmetic, "matmul", matmul_of(body))
            want = reference.layer(inputs, stored, problem_of(shape))
        for rank in range(2):
            assert wrong_rows(got[rank], want[rank].out) == [], (number, rank)
            assert len(got[rank]) == 0 or got[rank].float().abs().max() > 0


@bodies
def test_gemm2_against_float64(body: str) -> None:
    """Dense weights, tiles of 128 rows, more K than there are stages; one rank."""
    shape = Shape(1, 512, 1024, 2, topk=1, max_tokens=8, body=body, partials="bf16")
    logical = logical_weights(shape, sparse=False)
    ranks = LayerRanks(shape)
    call = random_call(shape, 8, 3, invalid=0)
    ranks.plan_only(0, call)
    ranks.set_rows(0, call)
    ranks.dispatch(0, call)
    generator = torch.Generator().manual_seed(9)
    codes, scales = mx.quantize_hidden(torch.randn(shape.rows, shape.inter_dim, generator=generator))
    ranks.hidden[0].out.copy_(codes)
    assert ranks.hidden[0].scales is not None
    ranks.hidden[0].scales.copy_(scales)
    ranks.stage2(0, prepared(shape, of_rank(shape, logical, 0))[1])
    w = exact_weights(logical.w2, logical.w2_scale)
    x = mx.dequantize(codes, scales).double()
    source = ranks.places[0].landed.source
    tiles = ranks.places[0].local.tiles
    # sums: [row][half][block, wg, warp, 16 columns], halves 16 columns apart
    sums = ranks.sums[0].view(shape.rows, 2, -1, 16).transpose(1, 2).reshape(shape.rows, -1)
    seen = 0
    for tile in range(int(tiles.counts[params.NUM_TILES])):
        rows = torch.arange(tile * 128, tile * 128 + 128)
        rows = rows[(source[rows] & 0xFFFFFF) < shape.max_tokens]
        want = x[rows] @ w[int(tiles.expert[tile])].T
        assert relative(sums[rows, : shape.model_dim], want) <= (2e-4 if body == "R" else 1e-6)
        seen += len(rows)
    assert seen == 8


@formats
def test_weighted_rows_are_rounded_as_the_host_target_does(partials: str) -> None:
    """From the kernel's own sums: every byte that came back, and nothing beside it. NaN and infinity too."""
    shape = Shape(1, 768, 256, 2, topk=2, max_tokens=8, body="A", tile_rows=64, partials=partials)
    logical = logical_weights(shape, sparse=False)
    ranks = LayerRanks(shape)
    call = random_call(shape, 7, 3, invalid=0.2)
    call.weights[0, 0], call.weights[1, 1] = float("inf"), 0.0
    ranks.plan_only(0, call)
    ranks.set_rows(0, call)
    ranks.dispatch(0, call)
    ranks.hidden[0].out.copy_(
        torch.randint(0, 0x7E, ranks.hidden[0].out.shape, generator=torch.Generator().manual_seed(2))
    )
    assert ranks.hidden[0].scales is not None
    ranks.hidden[0].scales.fill_(120)
    stored = stored_rows(ranks, 0)
    stored.fill_(0xCD)
    ranks.stage2(0, prepared(shape, of_rank(shape, logical, 0))[1])
    sums = ranks.sums[0].view(shape.rows, 2, -1, 16).transpose(1, 2).reshape(shape.rows, -1)
    problem, landed = problem_of(shape), ranks.places[0].landed
    written = torch.zeros(shape.max_routes, dtype=torch.bool)
    for row in range(int(ranks.places[0].local.tiles.counts[params.NUM_ROWS])):
        token, slot = int(landed.source[row]) & 0xFFFFFF, int(landed.source[row]) >> 24
        if token < shape.max_tokens:
            y = sums[row : row + 1, : shape.model_dim]
            want = arithmetic.partial_rows(y, landed.weight[row : row + 1], partials)
            at = token * shape.topk + slot
            got = stored[at, : problem.partial_bytes]
            assert torch.equal(one_nan(got, partials), one_nan(want[0], partials))
            written[at] = True
    assert int(written.sum()) == int((call.ids >= 0).sum())
    assert bool((stored[~written] == 0xCD).all())


def test_a_rank_that_does_not_come_back_is_named_and_the_kernel_ends() -> None:
    """Rank 1 makes its plan and dies: rank 0's combine waits for its rows, says so, and ends."""
    shape = Shape(2, 256, 256, 2, topk=1, max_tokens=8, body="R", tile_rows=64, partials="bf16")
    ranks = LayerRanks(shape, timeout_s=0.3)
    calls = [random_call(shape, 3, rank, invalid=0) for rank in range(2)]
    ranks.each(lambda rank: ranks.plan_only(rank, calls[rank]))
    ranks.combine(0, calls[0])
    found = ranks.fault(0)
    assert (found["code"], found["peer"], found["what"]) == (1, 1, params.WAIT_PARTIALS)
    assert (found["seen"], found["wanted"]) == (0, 1)
    error = error_of(found, 0.3)
    assert isinstance(error, PeerTimeout)
    assert "weighted rows of its experts, call 1" in str(error)


def test_w2_that_a_body_cannot_hold_is_refused_by_row() -> None:
    shape = Shape(1, 256, 256, 1, topk=1, max_tokens=8, body="R", partials="bf16")
    logical = logical_weights(shape, sparse=False)
    logical.w2_scale[0, 85, 2] += 40
    stored = of_rank(shape, logical, 0)
    assert w2_of(stored, problem_of(shape), 0).factors[85].max() > 2**20
    with pytest.raises(UnsupportedShape, match=r"w2 of expert 0: the scales of the row 85 are 2\^4"):
        prepared(shape, stored)
