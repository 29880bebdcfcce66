"""Each device quantises rows of bf16 to int8 with a FlyDSL kernel; the result is compared with torch.

    mori-sim run --devices 8 -- python packages/mori-sim/examples/quantise_rows.py

A workgroup takes a row: its four waves find their largest values, share them through LDS, and write the
codes. Leave out `fx.barrier()` and run with `--coherence strict`: the race between the waves is reported.
"""

import ctypes

import flydsl.compiler as flyc
import flydsl.expr as fx
import mori_sim
import torch

LANES, WAVES = 64, 4
WIDTH = LANES * WAVES


def pointer(kind, address, align, space=fx.AddressSpace.Global):
    return fx.inttoptr(
        fx.PointerType.get(elem_ty=kind.ir_type, address_space=space, alignment=align), address
    )


@fx.struct
class Shared:
    largest: fx.Array[fx.Float32, WAVES, 16]


@flyc.kernel
def quantise_rows(x: fx.Int64, codes: fx.Int64, scales: fx.Int64):
    item, row = fx.thread_idx.x, fx.block_idx.x
    shared = fx.SharedAllocator().allocate(Shared).peek()
    place = fx.Int32(fx.ptrtoint(shared.largest.ptr))
    value = fx.Float32(fx.generic_load(pointer(fx.BFloat16, x, 2) + row * WIDTH + item))
    largest = fx.absf(value)
    for distance in (1, 2, 4, 8, 16, 32):
        largest = fx.maxnumf(largest, fx.shuffle_xor(largest, distance, LANES))
    if item % LANES == 0:
        fx.generic_store(pointer(fx.Float32, place, 4, fx.AddressSpace.Shared) + item // LANES, largest)
    fx.barrier()
    for wave in range(WAVES):
        largest = fx.maxnumf(
            largest, fx.generic_load(pointer(fx.Float32, place, 4, fx.AddressSpace.Shared) + wave)
        )
    # Half away from zero, by adding a half and cutting off.
    scaled = value * (fx.Float32(127.0) / largest)
    code = fx.Int32(scaled + fx.Float32(0.5) * (scaled / fx.maxnumf(fx.absf(scaled), fx.Float32(1e-20))))
    fx.generic_store(pointer(fx.Int8, codes, 1) + row * WIDTH + item, fx.Int8(code))
    if item == 0:
        fx.generic_store(pointer(fx.Float32, scales, 4) + row, largest / fx.Float32(127.0))


@flyc.jit
def quantise(
    x: fx.Int64, codes: fx.Int64, scales: fx.Int64, height: fx.Int32, stream: fx.Stream = fx.Stream(None)
):
    quantise_rows(x, codes, scales).launch(grid=(height, 1, 1), block=(WIDTH, 1, 1), stream=stream)


def main() -> None:
    torch.manual_seed(0)
    height, count, hip = 6, ctypes.c_int(), ctypes.CDLL("libamdhip64.so.7")
    hip.hipGetDeviceCount(ctypes.byref(count))
    for device in range(count.value):
        hip.hipSetDevice(device)
        x = mori_sim.to_device(torch.randn(height, WIDTH).bfloat16(), device)
        codes = mori_sim.empty(height, WIDTH, dtype=torch.int8, device=device)
        scales = mori_sim.empty(height, device=device)
        quantise(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), height, stream=0)
        mori_sim.synchronize()
        error = (codes.float() * scales[:, None] - x.float()).abs().amax(1)
        assert (error <= 0.51 * scales).all(), (device, error, scales)
    print(f"{height} rows on each of {count.value} devices are right")


if __name__ == "__main__":
    main()
