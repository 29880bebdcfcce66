"""The GEMM kernel with one of its obligations left out: `mutant NAME right|wrong` for each.

Run below `mori-sim run --coherence strict`: the report names the kernel, and so the mutant, that broke a
rule.
Which obligation is which: the top of gemm_kernel.py; test_rocm_gemm.py has the table of what catches what.
"""

import itertools
from contextlib import contextmanager

import flydsl.expr as fx
from mori_gemm_ar.targets.rocm import gemm_kernel, gemm_scales
from mori_gemm_ar.targets.rocm.gemm import SHAPES
from mori_gemm_ar.targets.rocm.wire import ToOutput
from mori_gemm_ar.testing import gx
from rocm_gemm_program import product
from torch import bfloat16, equal


def without(module, name, number):
    """Leave out one call, counted from the kernel's beginning."""
    original, calls = getattr(module, name), itertools.count()

    def patched():
        if next(calls) != number:
            original()

    return module, name, patched


def barrier_alone():
    """`meet`, but for waiting for what this wave has read from LDS."""
    fx.rocdl.sched_barrier(0)
    fx.rocdl.s_barrier()
    fx.rocdl.sched_barrier(0)


def fetch_too_early(self, block, stage):
    """Into the stage that is being read."""
    _FETCH(self, block, 1 - stage)


def put_too_early(self, block, stage, state):
    """Over the ratios that are being read."""
    return _PUT(self, block, 1 - stage, state)


_FETCH, _PUT = gemm_kernel.Workgroup._fetch, gemm_scales.Blockscale.put

MUTANTS = {
    "none": lambda: (gemm_kernel, "meet", gemm_kernel.meet),
    "no_wait_before_the_first_block": lambda: without(gemm_kernel, "wait_for_dma", 0),
    "no_wait_in_phase_lb": lambda: without(gemm_kernel, "wait_for_dma", 1),
    "no_barrier_before_the_first_block": lambda: without(gemm_kernel, "meet", 0),
    "no_barrier_behind_la": lambda: without(gemm_kernel, "meet", 2),
    "no_barrier_behind_ma": lambda: without(gemm_kernel, "meet", 3),
    "no_barrier_behind_lb": lambda: without(gemm_kernel, "meet", 4),
    "no_barrier_behind_mb": lambda: without(gemm_kernel, "meet", 5),
    "no_barrier_behind_the_last_scales": lambda: without(gemm_kernel, "meet", 7),
    "reads_not_waited_for": lambda: (gemm_kernel, "meet", barrier_alone),
    "dma_too_early": lambda: (gemm_kernel.Workgroup, "_fetch", fetch_too_early),
    "ratios_too_early": lambda: (gemm_scales.Blockscale, "put", put_too_early),
}


@contextmanager
def patched(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


def main():
    g = gx(64, 128, 640, 0, "blockscale")
    want = g.exact().to(bfloat16)
    for name, mutate in MUTANTS.items():
        wire = ToOutput()
        wire.name = name
        with patched(*mutate()):
            got = product("blockscale", g.a, g.b, g.a_scale, g.b_scale, SHAPES[-1], wire)[0]
        print(f"mutant {name} {'right' if equal(got, want) else 'wrong'}", flush=True)


if __name__ == "__main__":
    main()
