"""The op under torch.compile, with fake tensors that have the right shape and storage of their own."""

import mori_shmem
import pytest
import torch
from mori_gemm_ar import GemmAllReduce
from mori_gemm_ar.testing import gx, gx_want
from mori_shmem.errors import UnsupportedShape

N, K = 136, 256


def compiled(op):
    """(whether relu(op) equals the eager result for each M, how often it was compiled)."""
    from mori_gemm_ar import nn

    compilations = []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=True, backend=backend)
    def layer(a, b, a_scale, b_scale):
        return torch.relu(nn.gemm_all_reduce(op, a, b, a_scale, b_scale))

    right = []
    for m in (16, 129, 16):
        g = gx(m, N, K, op.comm.rank, "blockscale")
        want = torch.relu(gx_want(m, N, K, op.comm.world_size, "blockscale"))
        right.append(torch.equal(layer(g.a, g.b, g.a_scale, g.b_scale), want))
    return right, len(compilations)


def checked(op):
    """The framework's own check of operators; (shape, dtype, device) of a fake result; its storage."""
    from mori_gemm_ar import nn
    from torch._subclasses.fake_tensor import FakeTensorMode

    g = gx(17, N, K, op.comm.rank, "blockscale")
    arguments = (g.a.view(torch.uint8), g.b.view(torch.uint8), g.a_scale, g.b_scale, nn.handle_of(op), N)
    operator = torch.ops.mori_gemm_ar.gemm_all_reduce.default
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=utils)
    mode = FakeTensorMode()
    with mode:
        fake = operator(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    out = nn.gemm_all_reduce(op, g.a, g.b, g.a_scale, g.b_scale)
    own_storage = out.data_ptr() != op(g.a, g.b, g.a_scale, g.b_scale).data_ptr()
    with pytest.raises(UnsupportedShape, match="float8_e4m3fnuz"):
        nn.gemm_all_reduce(op, g.a.view(torch.float8_e4m3fnuz), g.b, g.a_scale, g.b_scale)
    return (tuple(fake.shape), fake.dtype, fake.device.type), own_storage


def both():
    with mori_shmem.init("host", timeout_s=60) as comm, GemmAllReduce(comm, n=N, k=K, m_max=200) as op:
        return compiled(op), checked(op)


def test_GA_9_it_compiles_whole_and_passes_the_frameworks_check():
    for (right, compilations), (fake, own_storage) in mori_shmem.run_ranks(both, 2, timeout_s=200):
        assert right == [True] * 3
        assert compilations <= 2
        assert fake == ((17, N), torch.bfloat16, "cpu")
        assert own_storage
