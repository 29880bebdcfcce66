"""The programs of rocm_ranks.py on real GPUs: the simulated node's cases, and torch's own graphs.

nox --no-venv -s test-8gpu -- -k rocm        with a ROCm torch and mori-gemm-ar[rocm] in the environment
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.testing import gx, gx_want

pytestmark = [
    pytest.mark.skipif(torch.version.hip is None, reason="this torch was not built for ROCm"),
    pytest.mark.timeout(600),
]
PROGRAMS = (
    *("modes", "option_cases", "many_calls", "queued_calls", "replayed_graphs", "random_operands", "stages"),
    *("degenerate_rows", "strides_and_capacity", "second_call"),
)


def programs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rocm_ranks", Path(__file__).parent / "rocm_ranks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(world_size: int, name: str) -> None:
    for found in mori_shmem.run_ranks(getattr(programs(), name), world_size, world_size, timeout_s=500):
        assert found
        assert {case: wrong for case, wrong in found.items() if wrong} == {}


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_gpus(name: str) -> None:
    run(2, name)


@pytest.mark.gpu(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_gpus(name: str) -> None:
    run(8, name)


def model_shapes(world_size: int, mode: str) -> list[str]:
    """The layer itself: N=7168, K=2048 at prefill sizes, a hundred calls of each, eager and captured."""
    n, k, rows, wrong = 7168, 2048, (4096, 15360, 16384, 1000), []
    with (
        mori_shmem.init("rocm") as comm,
        torch.cuda.stream(torch.cuda.Stream(comm.device)),
        GemmAllReduce(comm, n=n, k=k, m_max=max(rows), mode=mode) as op,
    ):
        for m in rows:
            given = gx(m, n, k, comm.rank, "blockscale").to(comm.device)
            want = gx_want(m, n, k, world_size, "blockscale").to(comm.device)
            operands = (given.a, given.b, given.a_scale, given.b_scale)
            results = [torch.equal(op(*operands), want) for _ in range(100)]
            torch.cuda.synchronize()
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                out = op(*operands)
            for _ in range(100):
                out.fill_(torch.nan)
                graph.replay()
                results.append(torch.equal(out, want))
            if not all(results):
                wrong.append(f"m={m}: {results.count(False)} of {len(results)} calls")
    return wrong


@pytest.mark.gpu(8)
@pytest.mark.parametrize("mode", ["split-sdma", "fused-sdma", "split-lsa", "fused-lsa"])
def test_the_model_shape_a_hundred_times(mode: str) -> None:
    assert mori_shmem.run_ranks(model_shapes, 8, 8, mode, timeout_s=500) == [[]] * 8
