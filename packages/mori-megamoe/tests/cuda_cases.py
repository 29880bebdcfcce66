"""Small problems for the cuda target's GEMM1, with what is right for them; run on a GPU, or on the CPU's
emulation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from cuda_emulator import Library, tensor_map
from mori_megamoe import arithmetic, mx
from mori_megamoe.targets.cuda.gemm1 import Buffers, Gemm1, params_of
from mori_megamoe.targets.cuda.params import Gemm1Maps
from mori_megamoe.targets.cuda.tiles import HostTile, TileArrays
from mori_megamoe.targets.cuda.variants import BODIES, WAITS
from mori_megamoe.targets.cuda.weights import PreparedWeights, prepare_weights
from mori_shmem.jit import driver

POISON = 0x7F


def make_weights(
    experts: int,
    inter_dim: int,
    model_dim: int,
    *,
    tails: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(w1 and w1_scale as a caller stores them, the weights in float64 [experts, 2 I, D])."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (experts, 2 * inter_dim, model_dim)
    w = torch.randn(shape, generator=generator, device=device) * model_dim**-0.25
    if tails:  # like Student's t with 4 degrees of freedom
        w /= torch.randn(4, *shape, generator=generator, device=device).square().mean(0).sqrt() + 0.1
    codes, scales = mx.quantize_weight(w)
    stored = mx.W1Bytes(2 * inter_dim, model_dim // 2).shuffle(codes)
    stored_scales = mx.W1Scales(2 * inter_dim, model_dim // 32).shuffle(scales)
    return stored, stored_scales, exact_weights(codes, scales)


def exact_weights(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What packed codes and their scales stand for, in float64."""
    values = mx.decode_e2m1(mx.unpack_e2m1(codes), torch.float64)
    return (values.unflatten(-1, (-1, 32)) * mx.decode_e8m0(scales, torch.float64)[..., None]).flatten(-2)


def operand_rows(
    body: str, codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """rows.cuh in torch: what a body reads of quantised rows."""
    values = mx.decode_e4m3(codes).unflatten(-1, (-1, 32))
    if body == "A":
        return (values * mx.decode_e8m0(scales)[..., None]).flatten(-2).to(torch.bfloat16), None
    largest = scales.amax(-1).clamp_min(1)
    shift = (scales.to(torch.int32) - largest[:, None].to(torch.int32)).clamp_min(-100)
    return mx.encode_e4m3((values * torch.exp2(shift.float())[..., None]).flatten(-2)), largest


@dataclass(frozen=True)
class Problem:
    """Rows of each expert in a number of tiles."""

    counts: Sequence[int]  # rows by expert
    model_dim: int = 256
    inter_dim: int = 256
    tile_rows: int = 128
    body: str = "R"
    limit: float = 10.0
    tails: bool = False
    seed: int = 1

    @property
    def tiles(self) -> list[HostTile]:
        tiles, row = [], 0
        for expert, count in enumerate(self.counts):
            for _ in range(0, count, self.tile_rows):
                tiles.append(HostTile(expert, row, row))
                row += self.tile_rows
        return tiles

    @property
    def rows(self) -> int:
        return max(1, len(self.tiles)) * self.tile_rows

    @property
    def real(self) -> torch.Tensor:
        """[rows] bool: not padding."""
        flags: list[bool] = []
        for count in self.counts:
            flags += [i < count for i in range(-(-count // self.tile_rows) * self.tile_rows)]
        return torch.tensor(flags + [False] * (self.rows - len(flags)))

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantised rows, those of padding too."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, self.model_dim, generator=generator)
        x *= 0.5 + torch.rand(self.rows, 1, generator=generator)
        if self.tails:  # outlier channels
            x *= torch.exp(torch.randn(self.model_dim, generator=generator))
            x[:, torch.randperm(self.model_dim, generator=generator)[: max(1, self.model_dim // 500)]] *= 50
        return mx.quantize_input(x.bfloat16())


@dataclass
class Results:
    """Of one run."""

    buffers: Buffers
    exact: torch.Tensor | None = None  # float64 [rows, 2 I], of the quantised inputs

    @property
    def sums(self) -> torch.Tensor:
        assert self.buffers.sums is not None
        return self.buffers.sums

    def wanted_bytes(self, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales that follow from the run's own sums."""
        return mx.quantize_hidden(arithmetic.swiglu(self.sums, limit))


@functools.cache
def library(body: str, tile_rows: int, wait: str = "never") -> Library:
    """The GEMM on the CPU; it writes its sums too."""
    flags = (f"-DBODY={BODIES[body]}", f"-DTILE_ROWS={tile_rows}", f"-DWAIT={WAITS[wait]}", "-DSUMS=1")
    types = ["Gemm1Maps", "Gemm1Params"]
    kernels = {"gemm1": types} if wait == "never" else {"stage1": [*types, "SendParams"]}
    return Library("gemm1.cu", flags, kernels)


def cpu_maps(body: str, buffers: Buffers, tile_rows: int) -> Gemm1Maps:
    """`gemm1.maps_of` for the emulation."""
    maps = driver.aligned(Gemm1Maps)
    capacity, model_dim = buffers.rows.shape
    maps.rows = tensor_map(
        buffers.rows.data_ptr(),
        item_bytes=buffers.rows.dtype.itemsize,
        columns=model_dim,
        rows=capacity,
        box_columns=128 if body == "R" else 64,
        box_rows=tile_rows // 2,
        swizzled=True,
    )
    maps.out = tensor_map(
        buffers.out.data_ptr(),
        item_bytes=1,
        columns=buffers.out.shape[1],
        rows=capacity,
        box_columns=64,
        box_rows=tile_rows,
        swizzled=False,
    )
    return maps


def buffers_for(
    rows: torch.Tensor, row_scale: torch.Tensor | None, inter_dim: int, *, sums: bool = True
) -> Buffers:
    """Outputs poisoned."""
    capacity, device = len(rows), rows.device

    def codes(*shape: int) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=torch.uint8, device=device)

    return Buffers(
        rows,
        row_scale,
        codes(capacity, inter_dim),
        codes(capacity, inter_dim // 32),
        codes(capacity * inter_dim // 32),
        torch.full((capacity, 2 * inter_dim), torch.nan, device=device) if sums else None,
    )


def run(
    problem: Problem,
    weights: PreparedWeights,
    inputs: tuple[torch.Tensor, torch.Tensor],
    device: str,
    *,
    tiles: Sequence[HostTile] | None = None,
    grid: int = 2,
) -> Results:
    """GEMM1 of the problem's tiles on these quantised rows; results on the CPU."""
    rows, row_scale = operand_rows(problem.body, *inputs)
    buffers = buffers_for(
        rows.to(device), None if row_scale is None else row_scale.to(device), problem.inter_dim
    )
    listed = problem.tiles if tiles is None else tiles
    arrays = TileArrays.of_plan(listed, problem.inter_dim // 256, problem.tile_rows, device)
    if device == "cpu":
        maps = cpu_maps(problem.body, buffers, problem.tile_rows)
        params = params_of(weights, buffers, arrays, limit=problem.limit)
        library(problem.body, problem.tile_rows).run("gemm1", [maps, params], grid, 384)
        return Results(buffers)
    on_gpu = replace(weights, codes=weights.codes.to(device), base=weights.base.to(device))
    gemm = Gemm1(on_gpu, buffers, arrays, limit=problem.limit, tile_rows=problem.tile_rows)
    gemm.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return Results(
        Buffers(
            rows,
            row_scale,
            buffers.out.cpu(),
            *(
                None if t is None else t.cpu()
                for t in (buffers.scales, buffers.shuffled_scales, buffers.sums)
            ),
        )
    )


def exact_sums(problem: Problem, inputs: tuple[torch.Tensor, torch.Tensor], w: torch.Tensor) -> torch.Tensor:
    """float64 [rows, 2 I] of the quantised rows and the weights of their tiles' experts. On the weights'
    device."""
    codes, scales = (part.to(w.device) for part in inputs)
    x = mx.decode_e4m3(codes, torch.float64).unflatten(-1, (-1, 32))
    x = (x * mx.decode_e8m0(scales, torch.float64)[..., None]).flatten(-2)
    out = torch.zeros(problem.rows, w.shape[1], dtype=torch.float64, device=w.device)
    for tile in problem.tiles:
        here = slice(tile.row_base, tile.row_base + problem.tile_rows)
        out[here] = x[here] @ w[tile.expert].T
    return out.cpu()


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def weights_of(problem: Problem, device: str) -> tuple[PreparedWeights, torch.Tensor]:
    """Prepared, and in float64, made on the device."""
    stored, scales, exact = make_weights(
        len(problem.counts), problem.inter_dim, problem.model_dim, tails=problem.tails, device=device
    )
    sizes = {"model_dim": problem.model_dim, "inter_dim": problem.inter_dim}
    return prepare_weights(stored, scales, **sizes, body=problem.body), exact
