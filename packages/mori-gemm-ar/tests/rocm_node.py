"""All ranks of an op in one process of the simulated node, each on a device of its own.

The checker of strict mode knows what its own process has done: with all ranks in one, a store into a peer's
memory and the peer's load meet in it. Kernels and their arguments are the product's; only windows and queues
are made here, by the vendor libraries' own calls, at one address for everybody. Nothing waits between calls
but the streams.
"""

import ctypes
import struct
import time
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p

import mori_sim
import torch
from mori_gemm_ar.options import resolve
from mori_gemm_ar.plan import Phase, Plan
from mori_gemm_ar.problem import Problem
from mori_gemm_ar.targets.rocm import runner as rocm
from mori_gemm_ar.targets.rocm.gemm import Gemm, shape_for
from mori_gemm_ar.targets.rocm.gemm_kernel import gemm_kernel
from mori_gemm_ar.targets.rocm.launch import Here, Launches
from mori_gemm_ar.targets.rocm.limits import MAX_BAND_ROWS
from mori_gemm_ar.targets.rocm.meet import OTHER_M
from mori_gemm_ar.targets.rocm.regions import layout_for
from mori_gemm_ar.targets.rocm.wire import one_slice
from mori_gemm_ar.testing import gx
from mori_shmem.device import queue_words as words

GRANULE = 2 << 20
LATE_S = 0.05
RING_BYTES = 4096  # the smallest: it is filled several times
BY_ENGINE_ID, QUEUE_FLAGS = 6, 1 | 1 << 6 | 1 << 12 | 1 << 16 | 1 << 17
hip, kmt = ctypes.CDLL("libamdhip64.so.7"), ctypes.CDLL("libhsakmt.so.1")


def check(name, code):
    if code not in (0, 22):  # 22: open already
        raise RuntimeError(f"{name}: {code}")


def flat_window(world_size, nbytes):
    """(base, stride): a part on each device, all of them mapped for everybody, zeroed."""
    stride, flat = -(-nbytes // GRANULE) * GRANULE, c_void_p()
    check(
        "reserve", hip.hipMemAddressReserve(byref(flat), c_size_t(stride * world_size), 0, None, c_uint64(0))
    )
    everyone = b"".join(struct.pack("<iii", 1, device, 3) for device in range(world_size))
    for device in range(world_size):
        at, handle = c_void_p(flat.value + device * stride), c_void_p()
        properties = struct.pack("<iiiiQBBHi", 1, 1, 1, device, 0, 0, 0, 0, 0)
        check("create", hip.hipMemCreate(byref(handle), c_size_t(stride), properties, c_uint64(0)))
        check("map", hip.hipMemMap(at, c_size_t(stride), c_size_t(0), handle, c_uint64(0)))
        check("access", hip.hipMemSetAccess(at, c_size_t(stride), everyone, c_size_t(world_size)))
        ctypes.memset(at, 0, stride)
    return flat.value, stride


class Resource(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in ("id", "doorbell", "wptr", "rptr", "error")]


def sdma_queue(device, engine):
    """(address of the ring, resource)."""
    ring, resource, node = c_void_p(), Resource(), c_uint32(device + 1)
    check("ring", kmt.hsaKmtAllocMemory(node, c_uint64(RING_BYTES), c_uint32(QUEUE_FLAGS), byref(ring)))
    check("map", kmt.hsaKmtMapMemoryToGPU(ring, c_uint64(RING_BYTES), byref(c_uint64())))
    kind = (c_int(BY_ENGINE_ID), c_uint32(100), c_int(3), c_uint32(engine))
    made = kmt.hsaKmtCreateQueueExt(node, *kind, ring, c_uint64(RING_BYTES), None, byref(resource))
    check("queue", made)
    return ring.value, resource


class Node:
    """Queues and fault records of all ranks."""

    def __init__(self, world_size, timeout_s=60.0):
        check("open", kmt.hsaKmtOpenKFD())
        self.world_size, self.timeout_ticks = world_size, words.ticks(timeout_s)
        zeros = [{"device": rank, "uncached": True} for rank in range(world_size)]
        self.records = [mori_sim.zeros(8, dtype=torch.int32, **z) for z in zeros]
        self.tables = [
            mori_sim.zeros(world_size * words.QUEUE_BYTES // 8, dtype=torch.int64, **z) for z in zeros
        ]
        self.resources = []
        for rank, table in enumerate(self.tables):
            for peer in range(world_size):
                if peer != rank:
                    self.open_queue(table[peer * words.QUEUE_BYTES // 8 :], rank, peer)

    def open_queue(self, table, rank, peer):
        ring, resource = sdma_queue(rank, 2 + (peer - rank) % self.world_size)
        self.resources.append(resource)
        values = {
            words.RING: ring,
            words.RPTR: resource.rptr,
            words.WPTR: resource.wptr,
            words.DOORBELL: resource.doorbell,
            words.RING_BYTES: RING_BYTES,
            words.RECORD: self.records[rank].data_ptr(),
            words.TIMEOUT: self.timeout_ticks,
            words.PEER: peer,
        }
        for offset, value in values.items():
            table[offset // 8] = value


class Op:
    """One op on all ranks: `queue` calls on every device, `settle`, look at what was taken."""

    def __init__(self, node, mode, *, n, k, m_max, quant="blockscale", **options):
        self.node, self.n, self.k = node, n, k
        self.options = resolve(mode=mode, quant=quant, default_pull_blocks=64, **options)
        self.layout = layout_for(m_max, n, node.world_size, self.options)
        self.base, self.stride = flat_window(node.world_size, self.layout.nbytes)
        self.launches = [
            Launches(
                Here(
                    self.base,
                    self.stride,
                    rank,
                    node.tables[rank].data_ptr(),
                    node.records[rank].data_ptr(),
                    node.timeout_ticks,
                ),
                self.layout,
                self.options,
            )
            for rank in range(node.world_size)
        ]
        self.held = {}

    def operands(self, m, turn):
        """Everybody's operands of a call, in their devices' memory."""
        for rank in range(self.node.world_size):
            g = gx(m, self.n, self.k, rank, self.options.quant, turn=turn)
            a_grid, b_grid = g.grids()
            a, b, a_rows, b_grid = (
                mori_sim.to_device(x, rank) for x in (g.a, g.b, a_grid.t().contiguous(), b_grid)
            )
            partials = Gemm(self.n, self.k, self.options.quant, 0).partials(a, b, a_rows.t(), b_grid)
            self.held[m, turn, rank] = (partials, (a, b, a_rows, b_grid), self.table(m, rank))

    def table(self, m, rank):
        plan = self.plan(m)
        shape = shape_for(m, self.n, self.node.world_size)
        cut = self.launches[rank].slices(plan, shape)
        return mori_sim.to_device(torch.tensor(self.launches[rank].table(cut), dtype=torch.int64), rank)

    def plan(self, m):
        return Plan(Problem(m, self.n, self.k, self.node.world_size), self.options, MAX_BAND_ROWS)

    def queue(self, m, turn, late=None):
        """One call on every device, and behind it what a caller may do: take the result, and write over it.
        Returns at once. `m` is that of all ranks, or a tuple of theirs; `late` is a rank that begins when the
        others cannot get on without it."""
        rows = m if isinstance(m, tuple) else (m,) * self.node.world_size
        taken = [mori_sim.empty(m, self.n, dtype=torch.bfloat16, device=r) for r, m in enumerate(rows)]
        ranks = sorted(range(self.node.world_size), key=lambda rank: rank == late)
        for rank in ranks:
            if rank == late:
                time.sleep(LATE_S)
            self.begin(rank, rows[rank], turn)
        for rank in ranks:
            if rank == late:  # a second time, when all partial sums are there
                time.sleep(LATE_S)
            self.finish(rank, rows[rank])
            at, nbytes = self.base + rank * self.stride + self.layout.output_row(0), rows[rank] * self.n * 2
            copy = (c_void_p(taken[rank].data_ptr()), c_void_p(at), c_size_t(nbytes), c_int(3), None)
            check("copy", hip.hipMemcpyAsync(*copy))
            check("fill", hip.hipMemsetAsync(c_void_p(at), c_int(0xFF), c_size_t(nbytes), None))
        return taken

    def begin(self, rank, m, turn):
        """Up to the wait for everybody's partial sums."""
        plan = self.plan(m)
        check("device", hip.hipSetDevice(rank))
        start = self.launches[rank].start(plan)
        start.kernel.launch(start.args, start.blocks, 0)
        self.gemm(plan, turn, rank)
        for launch in self.launches[rank].after_gemm(plan):
            if launch.phase in (Phase.SCATTER, Phase.DRAIN):
                launch.kernel.launch(launch.args, launch.blocks, 0)

    def finish(self, rank, m):
        """The rest."""
        check("device", hip.hipSetDevice(rank))
        for launch in self.launches[rank].after_gemm(self.plan(m)):
            if launch.phase not in (Phase.SCATTER, Phase.DRAIN):
                launch.kernel.launch(launch.args, launch.blocks, 0)

    def gemm(self, plan, turn, rank):
        m, wire = plan.problem.m, rocm.WIRES.get(self.options.mode, rocm.OUTPUT)
        shape = shape_for(m, self.n, self.node.world_size)
        partials, _, table = self.held[m, turn, rank]
        if wire is rocm.OUTPUT:
            where, cut = self.launches[rank].plain_rows(plan), one_slice(m, shape)
        else:
            where, cut = table.data_ptr(), self.launches[rank].slices(plan, shape)
        kernel = gemm_kernel(self.options.quant, self.n, shape, wire)
        kernel.launch(partials.product(where), cut.num_tiles(-(-self.n // shape.cols)), 0)

    def settle(self):
        """Until everything queued has ended; for each fault record that a kernel has written, what it is
        about."""
        mori_sim.synchronize()
        late = [
            "other M" if record[words.RECORD_WHAT // 4] == OTHER_M else "deadline"
            for record in self.node.records
            if record[0]
        ]
        for record in self.node.records:
            record.zero_()
        return late
