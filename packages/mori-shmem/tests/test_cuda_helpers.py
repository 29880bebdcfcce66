"""What kernels of a caller's own use of the cuda target, in Triton and CUDA C++.

Run with `tools/gpu_run pytest -m gpu packages/mori-shmem`. Each test says which fault it is about; the
functions that run in the ranks hold the assertions. What a queue promises on every target stands in
test_queue_contract.py.
"""

from __future__ import annotations

import os
import time
from typing import Any

import mori_shmem
import pytest
from gpu_ranks import kernels_of, on_both, run
from mori_shmem.errors import (
    PeerTimeout,
)

KERNELS = os.path.join(os.path.dirname(__file__), "cuda_kernels.py")
pytestmark = pytest.mark.usefixtures("cuda_environment")


# ---- device helpers ----


@on_both
def test_triton_helpers_meet_signal_and_give_up(spread: bool) -> None:
    def rank(file: str) -> None:
        import torch

        kernel = kernels_of(file).meet_and_signal
        with mori_shmem.init(timeout_s=20) as comm:
            window = comm.alloc(4096)
            count = torch.zeros(1, dtype=torch.int64, device=comm.device)
            out = torch.zeros(2, dtype=torch.int64, device=comm.device)
            record = comm.fault_record
            table = torch.tensor(window.addresses, dtype=torch.int64, device=comm.device)
            for warps in (1, 4):
                for _ in range(20):
                    wanted = comm.read(window.at(512)) + 3
                    comm.barrier()
                    kernel[(1,)](table, count, record, comm.rank, 2, out, 10**10, wanted, num_warps=warps)
                    comm.barrier()
                    assert out.tolist() == [1, wanted]
            kernel[(1,)](table, count, record, comm.rank, 2, out, 3 * 10**8, 10**6, num_warps=4)
            with pytest.raises(PeerTimeout) as late:
                comm.barrier()
            assert (late.value.seen, late.value.wanted) == (123, 10**6)
            assert "flag 6/64 from rank" in str(late.value)
            time.sleep(1)
            comm.self_test()

    run(rank, 2, KERNELS, spread=spread)


@on_both
def test_cuda_helpers_meet_signal_and_give_up(spread: bool, tmp_path: Any) -> None:
    from mori_shmem.jit import Source, Variant, build, cuda_headers
    from mori_shmem.jit.cache import Cache
    from mori_shmem.jit.compilers import compiler_named

    file = tmp_path / "k.cu"
    file.write_text(_KERNEL)
    variant = Variant("mori-shmem", Source.read(file, [cuda_headers()]), (), "sm_90a")
    cubin = build(variant, compiler=compiler_named("nvrtc"), cache=Cache(None))
    run(_run_cuda_helpers, 2, cubin, spread=spread)


_KERNEL = """
#include "words.cuh"
extern "C" __global__ void kernel(const uint64_t* table, uint64_t* count, Fault* fault, uint64_t timeout_ns,
                                  uint64_t* out, uint64_t wanted, uint32_t rank) {
  const Window window = {table, 0, 0, rank, 2};
  const Limits limits = {fault, timeout_ns, rank};
  bool met = all_ranks_meet(window, 0, count, limits, 5);
  if (threadIdx.x == 0) {
    add_to_word<SYSTEM>((uint64_t*)peer_pointer(window, 1 - rank) + 64, 3);
    uint64_t* mine = (uint64_t*)peer_pointer(window, rank) + 64;
    out[0] = met && wait_word<SYSTEM>(mine, wanted, limits, 1 - rank, 6, 64);
    out[1] = load_word<DEVICE_SCOPE>(mine);
  }
  all_ranks_meet(window, 0, count, limits, 5);
}
"""


def _run_cuda_helpers(cubin: bytes) -> None:
    from ctypes import c_uint32, c_uint64

    import torch
    from mori_shmem.jit import driver

    with mori_shmem.init(timeout_s=20) as comm:
        window = comm.alloc(4096)
        count, out = (torch.zeros(2, dtype=torch.int64, device=comm.device) for _ in range(2))
        function = driver.Module(cubin).function("kernel")
        arguments = [
            c_uint64(v)
            for v in (
                window.handle.table,
                count.data_ptr(),
                comm.fault_record.data_ptr(),
                10**10,
                out.data_ptr(),
                0,
            )
        ]
        launch = driver.PreparedLaunch(function, 1, 64, [*arguments, c_uint32(comm.rank)])
        stream = torch.cuda.current_stream().cuda_stream
        for i in range(1, 41):
            arguments[5].value = 3 * i
            launch.launch(stream)
            comm.barrier()
            assert out.tolist() == [1, 3 * i]
        arguments[3].value, arguments[5].value = 3 * 10**8, 10**6
        launch.launch(stream)
        with pytest.raises(PeerTimeout) as late:
            comm.barrier()
        assert (late.value.seen, late.value.wanted) == (123, 10**6)
        assert "flag 6/64 from rank" in str(late.value)
        time.sleep(1)
        comm.self_test()
