"""What the test kernels share: typed pointers from 64-bit addresses."""

import flydsl.expr as fx

ORDER = fx.AtomicOrdering


def pointer(kind, address, align):
    """`pointer + n` counts elements of `kind`, not bytes."""
    return fx.inttoptr(
        fx.PointerType.get(elem_ty=kind.ir_type, address_space=fx.AddressSpace.Global, alignment=align),
        address,
    )


def low(value):
    return fx.Int32(value)


def high(value):
    return fx.Int32(fx.Uint64(value) >> 32)
