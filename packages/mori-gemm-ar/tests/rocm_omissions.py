"""What the protocol asks for (launch.py, wires.py, reduce.py), left out one at a time: who notices?

    rocm_omissions.py REPORT NAME ...     prints a line for each: LEFT OUT, NAME, HOW it was noticed
                                          (names that begin with `nothing` leave out nothing)

HOW is `rule x` (strict mode reported it), `result` (wrong rows) or `deadline` (a wait was late). An omission
is a patch of the modules that the kernels are traced from, made before and undone after. REPORT is the node's
own file.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import ClassVar
from unittest.mock import patch

import flydsl.expr as fx
import mori_shmem.device.flydsl as dev
import torch
from mori_gemm_ar.targets.rocm import gemm_kernel, limits, meet, pull, push, quantize, reduce, rows, wires
from mori_gemm_ar.targets.rocm.kernel import Kernel
from mori_gemm_ar.testing import gx_want
from rocm_node import Node, Op

WORLD_SIZE, N, K, M_MAX = 2, 136, 128, 130
CALLS = ((130, 0), (17, 1), (130, 1), (64, 0))
LATE_CALLS = CALLS[:3]


class Without:
    """A module in whose place some names do something else."""

    def __init__(self, module, **others):
        self._module, self._others = module, others

    def __getattr__(self, name):
        return self._others[name] if name in self._others else getattr(self._module, name)


def nothing(*args, **kwargs):
    """In place of a wait, a fence or a signal."""


def at_once(*args, **kwargs):
    """In place of a wait that says whether it was in time."""
    return fx.Boolean(True)


def signal_first(queue, dst, src, nbytes, signal=None):
    """A put whose signal does not come behind its bytes."""
    if signal is not None:
        dev.signal(queue, *signal)
    dev.put(queue, dst, src, nbytes)


nothing_left_out = contextlib.nullcontext


def plain_store(address, value, dtype=fx.Int64):
    """One that may stay in a cache."""
    fx.generic_store(dev.pointer(dtype, address, dtype.width // 8), dtype(value))


def first_tile(address, value):
    """A counter that looks complete to whoever comes first."""
    before = dev.add_agent(address, value)
    return before * 0 + dev.load_agent(address) * 0


def device(module, **others):
    """`module` with other device helpers."""
    return patch.object(module, "dev", Without(dev, **others))


FUSED, SPLIT = ("fused-sdma", {}), ("split-sdma", {})
PEERS, IN_PLACE = ("fused-lsa", {}), ("split-lsa", {})
PUSHED = ("fused-lsa", {"gather_transport": "sdma", "fuse_reduce_push": True})
FENCED = ("fused-lsa", {"gather_transport": "sdma", "fuse_reduce_push": True, "publish": "fence"})
FP8 = {"gather_dtype": "fp8", "gather_transport": "sdma"}
PUSHED_FP8 = ("fused-lsa", {**FP8, "fuse_quantize": True, "fuse_reduce_push": True})

# name: (op, what is left out); test_rocm_ordering.py has the table of who notices
OMISSIONS = {
    **{
        f"nothing: {mode} {' '.join(map(str, options.values()))}".strip(): ((mode, options), nothing_left_out)
        for mode, options in (FUSED, SPLIT, PEERS, IN_PLACE, PUSHED, FENCED, PUSHED_FP8)
    },
    "chunk: tiles past the caches": (FUSED, lambda: patch.object(wires.ToQueues, "writethrough", False)),
    "chunk: each wave waits for its stores": (FUSED, lambda: device(wires, wait_stores=nothing)),
    "chunk: the workgroup meets": (FUSED, lambda: patch.object(wires, "fx", Without(fx, barrier=nothing))),
    "chunk: posted by the last tile": (FUSED, lambda: device(wires, add_agent=first_tile)),
    "chunk: counted behind its bytes": (FUSED, lambda: device(wires, put=signal_first)),
    "call: counters are noted": (FUSED, lambda: patch.object(meet, "note_counters", nothing)),
    "nothing: different M": (FUSED, nothing_left_out),
    "meet: M is compared": (FUSED, lambda: patch.object(meet, "write_record", nothing)),
    "scatter: counted behind its bytes": (SPLIT, lambda: device(push, put=signal_first)),
    "drain: waits for partial sums": (FUSED, lambda: patch.object(meet, "await_due", nothing)),
    "drain: tells the peers (lsa)": (PEERS, lambda: patch.object(meet, "tell", nothing)),
    "drain: waits for partial sums (lsa)": (PEERS, lambda: patch.object(meet, "await_due", nothing)),
    "push: rows past the caches": (PUSHED, lambda: device(reduce, store16_through=dev.store16)),
    "push: codes past the caches": (PUSHED_FP8, lambda: device(rows, store_system=plain_store)),
    "push: each wave waits for its stores": (PUSHED, lambda: device(reduce, wait_stores=nothing)),
    "push: the workgroup meets": (PUSHED, lambda: patch.object(reduce, "fx", Without(fx, barrier=nothing))),
    "push: posted by the last workgroup": (PUSHED, lambda: device(reduce, add_agent=first_tile)),
    "push: counted behind its bytes": (PUSHED, lambda: device(reduce, put=signal_first)),
    "push (fence): writes back its L2": (FENCED, lambda: device(reduce, release_fence=nothing)),
    "push (fence): each wave waits for its stores": (FENCED, lambda: device(reduce, wait_stores=nothing)),
    "push (fence): the workgroup meets": (
        FENCED,
        lambda: patch.object(reduce, "fx", Without(fx, barrier=nothing)),
    ),
    "gather: counted behind its bytes": (SPLIT, lambda: device(push, put=signal_first)),
    "gather: waits for finished rows": (SPLIT, lambda: patch.object(push, "await_due", at_once)),
    "gather: waits for its own puts": (SPLIT, lambda: device(push, quiet=nothing)),
    "pull: tells the peers": (IN_PLACE, lambda: patch.object(pull, "tell", nothing)),
    "pull: waits for finished rows": (PEERS, lambda: patch.object(pull, "await_due", nothing)),
    # The last: what stays in a cache here is missed by the signals of whatever comes after.
    "drain: tiles in peers past the caches (lsa)": (
        PEERS,
        lambda: patch.object(wires.ToPeers, "writethrough", False),
    ),
}
APART = ("nothing: different M", "meet: M is compared")
FACTORIES = (
    gemm_kernel.gemm_kernel,
    meet.starter,
    meet.meeter,
    reduce.reducer,
    reduce.pusher,
    quantize.quantizer,
    quantize.dequantizer,
    push.scatterer,
    push.gatherer,
    pull.puller,
)


def run(node, mode, options):
    """Calls of several Ms, queued at once, and then with each rank late: [what was wrong]."""
    op = Op(node, mode, n=N, k=K, m_max=M_MAX, **options)
    wrong = []
    for m, turn in set(CALLS):
        op.operands(m, turn)
    for late in (None, *range(node.world_size)):
        calls = CALLS if late is None else LATE_CALLS
        taken = [op.queue(m, turn, late) for m, turn in calls]
        wrong += op.settle()
        for (m, turn), results in zip(calls, taken, strict=True):
            want = gx_want(m, N, K, node.world_size, "blockscale", op.options.gather_dtype, turn=turn)
            wrong += ["result" for result in results if not torch.equal(result, want)]
    return wrong


def run_apart(node, mode, options):
    """A call for which the ranks have different M."""
    op, rows = Op(node, mode, n=N, k=K, m_max=M_MAX, **options), (130, 64)
    for m in rows:
        op.operands(m, 0)
    taken, told = op.queue(rows, 0), op.settle()
    right = [gx_want(m, N, K, node.world_size, "blockscale", "bf16", turn=0) for m in rows]
    return told or ["result" for got, want in zip(taken, right, strict=True) if not torch.equal(got, want)]


def broken_rules(report, before):
    lines = report.read_text().splitlines()[before:] if report.exists() else []
    entries = [json.loads(line) for line in lines]
    return [f"rule {entry['rule']}" for entry in entries if entry.get("kind") == "coherence"]


class KeptKernel(Kernel):
    """Never unloaded: the node reports a place in the code once, and code must not come to lie where other
    code was."""

    kept: ClassVar = []

    def __init__(self, *args):
        super().__init__(*args)
        self.kept.append(self)


def main(report, names):
    for module in (gemm_kernel, meet, pull, push, quantize, reduce):
        module.Kernel = KeptKernel
    node = Node(WORLD_SIZE, timeout_s=5.0)
    for name in names:
        (mode, options), left_out = OMISSIONS[name]
        for factory in FACTORIES:
            factory.cache_clear()
        before = len(report.read_text().splitlines()) if report.exists() else 0
        with left_out(), patch.object(limits, "ONE_STAGE_BYTES", 0):
            wrong = (run_apart if name in APART else run)(node, mode, options)
        found = sorted({*wrong, *broken_rules(report, before)})
        print("LEFT OUT", name, ", ".join(found) or "nobody", sep="\t", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(OMISSIONS))
