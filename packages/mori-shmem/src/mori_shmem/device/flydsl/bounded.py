"""Stores that end where a buffer ends: what lies behind it is left alone, without a branch.

    target = bounded(address, nbytes)                the same for all lanes of a wave; nbytes below 2^32
    store16_bounded(target, offset, vector)          each lane 16 bytes at its own 32-bit offset, cached
    store16_bounded(target, offset, vector, through=True)    past all caches, as store16_through
An offset of -1 is behind every end.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import rocdl

_THROUGH = 17  # sc0 sc1, as a raw buffer instruction's `aux` spells them


def bounded(address, nbytes):
    """A buffer descriptor: loads behind its end give 0, stores do nothing."""
    kind = fx.PointerType.get(elem_ty=fx.Int32.ir_type, address_space=fx.AddressSpace.Global, alignment=4)
    pointer = fx.rocdl.make_buffer_ptr(fx.inttoptr(kind, address), num_records_bytes=fx.Int64(nbytes))
    return fx.rocdl.get_buffer_rsrc(pointer)


def store16_bounded(target, offset, vector, *, through=False):
    """A Vector of four Int32. With `through` it has arrived after `wait_stores`."""
    aux = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), _THROUGH if through else 0)
    rocdl.raw_ptr_buffer_store(
        vector.ir_value(), target, fx.Int32(offset).ir_value(), fx.Int32(0).ir_value(), aux=aux
    )
