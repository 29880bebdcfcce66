"""The GEMM kernel alone on the simulated node: `ok NAME` for each case that is right.

Run below `mori-sim run`. Arguments: names of cases, none for all.
"""

import sys
import time

import mori_sim
import torch
from mori_gemm_ar import reference
from mori_gemm_ar.quant.operands import a_scale_grid, b_scale_grid
from mori_gemm_ar.quant.quantize import quantize
from mori_gemm_ar.targets.rocm.gemm import SHAPES, Gemm
from mori_gemm_ar.targets.rocm.gemm_kernel import gemm_kernel
from mori_gemm_ar.targets.rocm.wire import ToOutput, one_slice
from mori_gemm_ar.testing import gx

QUANTS = ("blockscale", "ptpc", "mxfp8")
WIRE = ToOutput()
LARGEST, SMALLEST = SHAPES[0], SHAPES[-1]
CPU = torch.device("cpu")


def product(quant, a, b, a_scale, b_scale, shape):
    """bf16 [m, n] from the kernel; `a` and the others as a caller would pass them."""
    a, b, a_scale, b_scale = (held(x) for x in (a, b, a_scale, b_scale))
    (m, k), n = a.shape, b.shape[0]
    grids = a_scale_grid(a_scale, quant, m, k, CPU), b_scale_grid(b_scale, quant, n, k, CPU)
    partials = Gemm(n, k, quant, 256).partials(a, b, *grids)
    guard = 64  # rows behind the result that must stay as they are
    out = mori_sim.zeros(m + guard, n, dtype=torch.bfloat16)
    out.fill_(7.0)
    num_tiles = one_slice(m, shape).num_tiles(-(-n // shape.cols))
    gemm_kernel(quant, n, shape, WIRE).launch(partials.product(out.data_ptr()), num_tiles, 0)
    mori_sim.synchronize()
    assert (out[m:] == 7.0).all(), "rows behind the end were written"
    return out[:m].clone(), (a, b, *grids)


def held(x):
    """The same on the device, strides and all."""
    if x.is_contiguous():
        return mori_sim.to_device(x)
    base = mori_sim.to_device(x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0))
    return base.as_strided(x.shape, x.stride(), x.storage_offset())


def exact(quant, m, n, k, shape):
    """GX: every product and sum is exact in bf16, so the result is the host target's, byte for byte."""
    g = gx(m, n, k, 0, quant)
    got, _ = product(quant, g.a, g.b, g.a_scale, g.b_scale, shape)
    want = g.exact().to(torch.bfloat16)
    assert torch.equal(got, want), ((got != want).nonzero()[:8], int((got != want).sum()))


def random(quant, m, n, k, shape, a=None):
    torch.manual_seed(m + n + k)
    a = torch.randn(m, k) * torch.logspace(-3, 3, m)[:, None] if a is None else a
    (a, a_scale), (b, b_scale) = quantize(a, quant, "a"), quantize(torch.randn(n, k), quant, "b")
    got, operands = product(quant, a, b, a_scale, b_scale, shape)
    check(quant, got, *operands)


def check(quant, got, a, b, a_grid, b_grid):
    """Half a bf16 step of the result, plus what fp32 sums may lose."""
    x, y = reference.dequantized(a, a_grid, quant, "a"), reference.dequantized(b, b_grid, quant, "b")
    want, magnitude = x @ y.t(), x.abs() @ y.abs().t()
    k = a.shape[1]
    bound = want.abs() * 2.0**-8 + magnitude * (k / 128 + 8) * 2.0**-24
    wrong = ~((got.double() - want).abs() <= bound)
    assert not wrong.any(), (wrong.nonzero()[:4], got[wrong][:4], want[wrong][:4])
    equal = (got == want.bfloat16()).double().mean().item()
    assert equal > 0.98, equal


CASES = {}
for quant in QUANTS:
    CASES[f"exact_{quant}"] = lambda q=quant: exact(q, 256, 256, 384, LARGEST)
    CASES[f"ragged_{quant}"] = lambda q=quant: exact(q, 129, 136, 256, SMALLEST)
    CASES[f"random_{quant}"] = lambda q=quant: random(q, 300, 264, 512, LARGEST)

if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        start = time.monotonic()
        CASES[name]()
        print(f"ok {name} {time.monotonic() - start:.2f}s", flush=True)
