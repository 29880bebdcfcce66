"""The GEMM kernel alone: `ok NAME` for each case that is right. Arguments: names of cases, none for all.

Runs on the simulated node below `mori-sim run`, and on a GPU of torch's without it.
"""

import sys
import time

import torch
from mori_gemm_ar import reference
from mori_gemm_ar.quant.operands import a_scale_grid, b_scale_grid
from mori_gemm_ar.quant.quantize import quantize
from mori_gemm_ar.targets.host.gemm import Gemm as HostGemm
from mori_gemm_ar.targets.rocm.gemm import SHAPES, Gemm
from mori_gemm_ar.targets.rocm.gemm_kernel import gemm_kernel
from mori_gemm_ar.targets.rocm.wire import ToOutput, one_slice
from mori_gemm_ar.testing import gx

if torch.version.hip:
    DEVICE = torch.device("cuda")
    synchronize = torch.cuda.synchronize
else:
    import mori_sim

    DEVICE = torch.device("cpu")
    synchronize = mori_sim.synchronize

QUANTS = ("blockscale", "ptpc", "mxfp8")
WIRE = ToOutput()
LARGEST, SMALLEST = SHAPES[0], SHAPES[-1]
GUARD_ROWS = 64  # behind the result, that must stay as they are


def product(quant, a, b, a_scale, b_scale, shape, wire=WIRE):
    """(bf16 [m, n] from the kernel, operands with scales as grids); arguments as a caller would pass them."""
    a, b, a_scale, b_scale = (held(x) for x in (a, b, a_scale, b_scale))
    (m, k), n = a.shape, b.shape[0]
    grids = a_scale_grid(a_scale, quant, m, k, DEVICE), b_scale_grid(b_scale, quant, n, k, DEVICE)
    partials = Gemm(n, k, quant, 256).partials(a, b, *grids)
    out = on_device(torch.full((m + GUARD_ROWS, n), 7.0, dtype=torch.bfloat16))
    num_tiles = one_slice(m, shape).num_tiles(-(-n // shape.cols))
    gemm_kernel(quant, n, shape, wire).launch(partials.product(out.data_ptr()), num_tiles, 0)
    synchronize()
    out = out.cpu().clone()
    assert (out[m:] == 7.0).all(), "rows behind the end were written"
    return out[:m], tuple(x.cpu() for x in (a, b, *grids))


def on_device(x):
    return x.to(DEVICE) if torch.version.hip else mori_sim.to_device(x)


def held(x):
    """The same on the device, strides and all."""
    if x.is_contiguous():
        return on_device(x)
    base = on_device(x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0))
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


# ---- results whose arithmetic is fixed


def exact(quant, m, n, k, shape, padding=0, wire=WIRE):
    """GX: every product and sum is exact in bf16. The result is the host target's, byte for byte."""
    g = gx(m, n, k, 0, quant)
    a, b = (torch.full((len(x), k + padding), 3.0).to(torch.float8_e4m3fn) for x in (g.a, g.b))
    a[:, :k], b[:, :k] = g.a, g.b
    got, operands = product(quant, a[:, :k], b[:, :k], g.a_scale, g.b_scale, shape, wire)
    want = g.exact().to(torch.bfloat16)
    assert torch.equal(got, want), ((got != want).nonzero()[:8], int((got != want).sum()))
    host = torch.empty(m, n, dtype=torch.bfloat16)
    partials = HostGemm(n, k, quant, m).partials(*operands)
    partials.begin()
    partials.store(range(m), host)
    assert torch.equal(got.view(torch.uint8), host.view(torch.uint8))


# ---- results within what fp32 sums and one rounding allow


def random(quant, m, n, k, shape, wire=WIRE):
    torch.manual_seed(m + n + k)
    a, a_scale = quantize(torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None], quant, "a")
    b, b_scale = quantize(torch.randn(n, k), quant, "b")
    got, operands = product(quant, a, b, a_scale, b_scale, shape, wire)
    check(quant, got, *operands)
    assert (got == exact_product(quant, *operands)[0].bfloat16()).double().mean() > 0.98


def exact_product(quant, a, b, a_grid, b_grid):
    """(the product, that of magnitudes) in float64."""
    x, y = reference.dequantized(a, a_grid, quant, "a"), reference.dequantized(b, b_grid, quant, "b")
    return x @ y.t(), x.abs() @ y.abs().t()


def check(quant, got, a, b, a_grid, b_grid, slack=0.0):
    want, magnitude = exact_product(quant, a, b, a_grid, b_grid)
    bound = want.abs() * 2.0**-8 + magnitude * (a.shape[1] / 128 + 8) * 2.0**-24 + slack
    wrong = ~((got.double() - want).abs() <= bound)
    assert not wrong.any(), (wrong.nonzero()[:4], got[wrong][:4], want[wrong][:4])


# ---- scales that are hard on a single accumulator


def degenerate():
    """Rows of A under scales that are zero here and there, tiny, huge, or apart by more than fp32's range."""
    m, n, k = 64, 136, 640
    torch.manual_seed(0)
    a, b = (torch.randint(-8, 9, (rows, k)).float().to(torch.float8_e4m3fn) for rows in (m, n))
    blocks = k // 128
    a_scale = torch.ones(m, blocks)
    patterns = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0], [1, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
    patterns += [[2.0**e for e in row] for row in ([-100, 60, -100, 60, -100], [100, -26, -27, -28, 100])]
    patterns += [
        [2.0**-120] * 5,
        [1, 2.0**-126, 1, 2.0**-126, 2.0**-126],
        [-1, 1, -1, 1, -1],
        [3, 5, 7, 11, 13],
    ]
    for row, pattern in enumerate(patterns):
        a_scale[row] = torch.tensor(pattern, dtype=torch.float32)
    b_scale = torch.ones(2, blocks)
    b_scale[1, 2] = 0
    got, operands = product("blockscale", a, b, a_scale.t().contiguous(), b_scale, SMALLEST)
    slack = (a_scale.abs().amax(1, keepdim=True).double() * blocks * 2.0**-55).repeat(1, n)
    slack[:, 128:] += 2.0**-101  # 2^25 of the smallest unit: there is a zero among these columns' scales
    check("blockscale", got, *operands, slack=slack)
    assert (got[3] == 0).all(), "all scales of a row are zero"


def not_finite():
    """What is not finite stays in its row, or in its 128 columns."""
    m, n, k = 40, 264, 384
    g = gx(m, n, k, 0, "blockscale")
    right = product("blockscale", g.a, g.b, g.a_scale, g.b_scale, SMALLEST)[0]
    for where, value in ((0, float("nan")), (1, float("inf")), (2, float("nan"))):
        a_scale, b_scale = g.a_scale.clone(), g.b_scale.clone()
        a_scale[where, 7] = value  # block `where` of row 7
        b_scale[1, where] = value
        got = product("blockscale", g.a, g.b, a_scale, b_scale, SMALLEST)[0]
        hit = torch.zeros(m, n, dtype=torch.bool)
        hit[7], hit[:, 128:256] = True, True
        assert not torch.isfinite(got[hit]).any()
        assert torch.equal(got[~hit], right[~hit])
    for quant in QUANTS:  # a code that is NaN
        g = gx(m, n, k, 0, quant)
        right = product(quant, g.a, g.b, g.a_scale, g.b_scale, SMALLEST)[0]
        a = g.a.clone()
        a.view(torch.uint8)[9, 130] = 0x7F
        got = product(quant, a, g.b, g.a_scale, g.b_scale, SMALLEST)[0]
        others = torch.arange(m) != 9
        assert got[9].isnan().all()
        assert torch.equal(got[others], right[others])


def mx_scales():
    """Scale bytes far from 127, and 255, which is NaN for its 32 k of its row."""
    m, n, k = 40, 136, 256
    g = gx(m, n, k, 0, "mxfp8")
    a_scale = g.a_scale.clone()
    a_scale[3], a_scale[4], a_scale[5, 7] = 20, 230, 255
    got, operands = product("mxfp8", g.a, g.b, a_scale, g.b_scale, SMALLEST)
    finite = torch.arange(m) != 5
    assert got[5].isnan().all()
    assert torch.equal(got[finite], exact_product("mxfp8", *operands)[0].bfloat16()[finite])


def two_shapes():
    """One kernel for every M and K: alternating, and twenty times in a row. It is traced once."""
    wire, traces, begin = ToOutput(), [], ToOutput.begin
    wire.begin = lambda args: (traces.append(args), begin(wire, args))
    for m, k in ((17, 256), (130, 128), (17, 256), *[(65, 384)] * 20):
        exact("blockscale", m, 136, k, SMALLEST, wire=wire)
    assert len(traces) == 1


def model_tile():
    """One tile of the model's shape, by a kernel of its own name, whose instructions are counted."""
    wire = ToOutput()
    wire.name = "model"
    random("blockscale", 256, 256, 2048, LARGEST, wire)


CASES = {
    "degenerate": degenerate,
    "not_finite": not_finite,
    "mx_scales": mx_scales,
    "two_shapes": two_shapes,
    "model_tile": model_tile,
}
for _quant in QUANTS:
    for _shape in SHAPES:
        # as many rows and columns as the tile, and one more tile with a few of each
        CASES[f"exact_{_quant}_{_shape}"] = lambda q=_quant, s=_shape: exact(
            q, s.rows + 3, s.cols + 8, 384, s
        )
    CASES[f"one_block_{_quant}"] = lambda q=_quant: exact(q, 129, 136, 128, SMALLEST)
    CASES[f"one_row_{_quant}"] = lambda q=_quant: exact(q, 1, 8, 256, SMALLEST)
    CASES[f"odd_k_{_quant}"] = lambda q=_quant: exact(q, 17, 136, 328, SMALLEST)
    CASES[f"padded_rows_{_quant}"] = lambda q=_quant: exact(q, 70, 136, 256, SMALLEST, padding=64)
    CASES[f"padded_odd_k_{_quant}"] = lambda q=_quant: exact(q, 17, 136, 328, SMALLEST, padding=5)
    CASES[f"random_{_quant}"] = lambda q=_quant: random(q, 300, 264, 512, LARGEST)


def main(names):
    for name in names or CASES:
        start = time.monotonic()
        CASES[name]()
        print(f"ok {name} {time.monotonic() - start:.2f}s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
