"""Loads, stores and fences of gfx950 with the scope that they reach, and nothing left to a default.

What is where (one GPU has eight L2 caches that do not see each other; copy engines and peers see none):
    plain      stays in the L1 and L2 of the compute unit that stored it, until somebody writes it back
    agent      what other compute units of this GPU may read and write: sc1
    system     what copy engines, peers and the host may read and write: sc0 sc1

A release is: my stores have arrived (`wait_stores`), my L2 has been written back (`release_fence` does
both), then a store in the scope of who reads it. An acquire is: a load in that scope has seen the value,
then the caches are emptied (`acquire_fence`). A fence covers the wave that runs it and, for the written-back
L2, what other waves of the workgroup had stored and waited for before the last fx.barrier().
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import llvm

_ORDER = fx.AtomicOrdering
_SCOPES = {"system": None, "agent": "agent"}


def pointer(dtype, address, alignment):
    """An address as a pointer to elements of `dtype` in global memory."""
    kind = fx.PointerType.get(
        elem_ty=dtype.ir_type, address_space=fx.AddressSpace.Global, alignment=alignment
    )
    return fx.inttoptr(kind, address)


def _word(address, dtype):
    return pointer(dtype, address, dtype.width // 8)


# ---- 16 bytes of data ----


def load16(address):
    """Through the caches."""
    return fx.generic_load(pointer(fx.Int32, address, 16), count=4)


def store16(address, vector):
    """Into the caches."""
    fx.generic_store(pointer(fx.Int32, address, 16), vector)


def store16_through(address, vector):
    """To memory, past the caches. It has arrived after `wait_stores`."""
    llvm.inline_asm(
        None,
        [fx.Int64(address).ir_value(), vector.ir_value()],
        "global_store_dwordx4 $0, $1, off sc0 sc1",
        "v,v,~{memory}",
        has_side_effects=True,
    )


def load16_fresh(*addresses):
    """From memory, whatever the caches hold: a Vector for one address, a list for several. All loads are in
    flight together, and the last instruction waits for them: after an acquire_fence `load16` is as right
    and waits later."""
    count = len(addresses)
    kind = fx.Vector.make_type(4, fx.Int32)
    loads = [f"global_load_dwordx4 ${i}, ${count + i}, off sc0 sc1" for i in range(count)]
    result = llvm.inline_asm(
        kind if count == 1 else ir.Type.parse(f"!llvm.struct<({', '.join([str(kind)] * count)})>"),
        [fx.Int64(address).ir_value() for address in addresses],
        "\n".join([*loads, "s_waitcnt vmcnt(0)"]),
        ",".join(["=&v"] * count + ["v"] * count + ["~{memory}"]),
        has_side_effects=True,
    )
    if count == 1:
        return fx.Vector(result)
    return [fx.Vector(llvm.extractvalue(kind, result, [i])) for i in range(count)]


# ---- flags and counters ----


def load_system(address, dtype=fx.Int64):
    """A flag that a copy engine, a peer or the host writes."""
    return fx.generic_load(_word(address, dtype), memory_order=_ORDER.Monotonic)


def load_agent(address, dtype=fx.Int64):
    """A flag that kernels of this GPU write."""
    return fx.generic_load(_word(address, dtype), memory_order=_ORDER.Monotonic, syncscope="agent")


def store_system(address, value, dtype=fx.Int64):
    fx.generic_store(_word(address, dtype), dtype(value), memory_order=_ORDER.Monotonic)


def store_agent(address, value, dtype=fx.Int64):
    fx.generic_store(_word(address, dtype), dtype(value), memory_order=_ORDER.Monotonic, syncscope="agent")


def store_release_system(address, value, dtype=fx.Int64):
    fx.generic_store(_word(address, dtype), dtype(value), memory_order=_ORDER.Release)


def store_release_agent(address, value, dtype=fx.Int64):
    fx.generic_store(_word(address, dtype), dtype(value), memory_order=_ORDER.Release, syncscope="agent")


def add_agent(address, value, dtype=fx.Int64):
    """The value before. A whole wave that adds to one address becomes one addition of the sum."""
    return fx.atomic_add(_word(address, dtype), dtype(value), syncscope="agent")


def add_system(address, value, dtype=fx.Int64):
    """The value before. At a peer, too."""
    return fx.atomic_add(_word(address, dtype), dtype(value))


# ---- fences ----


def release_fence(scope):
    """Write back this L2, and wait until that and what this wave stored have arrived."""
    fx.memory_fence(ordering=_ORDER.Release, syncscope=_SCOPES[scope])


def acquire_fence(scope):
    """Empty this compute unit's caches: later loads see what the flag that was read before announced."""
    fx.memory_fence(ordering=_ORDER.Acquire, syncscope=_SCOPES[scope])


def wait_stores():
    """Until what this wave stored has arrived: in memory where it went past the caches or to uncached
    memory, in this L2 elsewhere."""
    fx.memory_fence(
        ordering=_ORDER.AcqRel, syncscope="singlethread"
    )  # no instruction: keeps the compiler in order
    fx.rocdl.s_waitcnt(vmcnt=0)
