"""One finished row in a wave's registers: its largest magnitude, its fp8 codes, and the way back. Device
code.

Byte for byte what the host target makes of the row; quant/quantize.py has the rules for zero, tiny and
non-finite rows. Lane l holds the 8 elements at column 8 * (64 * i + l) for i = 0, 1, ... Where a row ends
inside a strip, lanes behind the end hold its last 8 elements once more: that changes no maximum, and they
store nothing.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, no-untyped-call"
import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_shmem.device.flydsl as dev

LANES = 64
PACK = 8  # elements that a lane moves at once: 16 bytes of bf16, 8 of fp8
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126
_INFINITY_BITS = 0x7F80  # of a bf16 number without its sign
_NAN_CODES = 0x7F7F7F7F


def strips_of(n: int) -> int:
    """How many packs of a row of n elements each lane holds."""
    return -(-n // (LANES * PACK))


def column_of(n: int, strip: int, lane):
    """(first column of the lane's pack, the same kept inside of the row)."""
    column = (lane + strip * LANES) * PACK
    if n % (LANES * PACK) == 0:
        return column, column
    return column, fx.min(column, fx.Int32(n - PACK))


def held_row(n, address, lane):
    """The packs of a row of bf16 that a lane holds."""
    return [
        fx.generic_load(dev.pointer(fx.BFloat16, address, 16) + column_of(n, strip, lane)[1], count=PACK)
        for strip in range(strips_of(n))
    ]


def largest_magnitude(packs):
    """The bits of the largest |x| of a row, as an integer: NaN is above infinity, and that above all numbers.

    packs  # Vectors of 8 bf16
    """
    largest = fx.Int32(0)
    for pack in packs:
        words = pack.bitcast(fx.Int32)
        for i in range(PACK // 2):
            largest = fx.max(largest, words[i] & 0x7FFF, (words[i] >> 16) & 0x7FFF)
    for distance in (32, 16, 8, 4, 2, 1):
        largest = fx.max(largest, fx.shuffle_xor(largest, distance, LANES))
    return largest


def scale_of(largest):
    """The row's scale, fp32: amax / 448; 1 of a zero row, NaN of one that is not finite."""
    amax = fx.Int32(largest << 16).bitcast(fx.Float32)
    scale = fx.maxnumf(amax / fx.Float32(E4M3_MAX), fx.Float32(SMALLEST_SCALE))
    scale = (largest == 0).select(fx.Float32(1.0), scale)
    return (largest >= _INFINITY_BITS).select(fx.Float32(float("nan")), scale)


def narrowed(pack, scale, finite):
    """8 codes, two words, of 8 fp32 values; NaN codes unless the row is finite."""
    words = []
    for i in range(0, PACK, 4):
        low, high = ((pack[i + j] / scale, pack[i + j + 1] / scale) for j in (0, 2))
        half = fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, *low, fx.Int32(0), False)
        word = fx.Int32(fx.rocdl.cvt_pk_fp8_f32(fx.Int32.ir_type, *high, half, True))
        words.append(finite.select(word, fx.Int32(_NAN_CODES)))
    return fx.Vector.from_elements(words, fx.Int32)


def widened(words, scale):
    """8 bf16 values of two words of codes."""
    values = []
    for i in range(PACK // 4):
        for half in (False, True):
            pair = fx.Vector(fx.rocdl.cvt_pk_f32_fp8(fx.Float32x2.ir_type, words[i], half))
            values += [pair[0] * scale, pair[1] * scale]
    return fx.Vector.from_elements(values, fx.Float32).to(fx.BFloat16)


@flyc.jit
def store_narrowed(packs, n, codes, scale_at, lane, through=False):
    """A row as codes and scale. `through`: past the caches, for a copy engine that is told by this very
    kernel."""
    largest = largest_magnitude(packs)
    scale = scale_of(largest)
    for strip in fx.range_constexpr(strips_of(n)):
        column, _ = column_of(n, strip, lane)
        words = narrowed(packs[strip].to(fx.Float32), scale, largest < _INFINITY_BITS)
        if column < n:
            if fx.const_expr(through):
                dev.store_system(codes + fx.Int64(column), words.bitcast(fx.Int64)[0])
            else:
                fx.generic_store(dev.pointer(fx.Int32, codes + fx.Int64(column), 8), words)
    if lane == 0:
        if fx.const_expr(through):
            dev.store_system(scale_at, scale, fx.Float32)
        else:
            fx.generic_store(dev.pointer(fx.Float32, scale_at, 4), scale)


@flyc.jit
def widen_row(n, codes, scale_at, out, lane):
    """out, bf16 = codes * scale. All codes of the row are under way before the first is needed."""
    scale = fx.generic_load(dev.pointer(fx.Float32, scale_at, 4))
    held = [
        fx.generic_load(
            dev.pointer(fx.Int32, codes + fx.Int64(column_of(n, strip, lane)[1]), 8), count=PACK // 4
        )
        for strip in range(strips_of(n))
    ]
    for strip in fx.range_constexpr(strips_of(n)):
        column, _ = column_of(n, strip, lane)
        if column < n:
            dev.store16(out + fx.Int64(column) * 2, widened(held[strip], scale).bitcast(fx.Int32))
