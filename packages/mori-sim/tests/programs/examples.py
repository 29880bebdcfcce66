"""Every kernel of rows.py, peer.py and matmul.py through FlyDSL's own launch path; `ok NAME` for each.

Run below `mori-sim run`. Arguments: the names to run, or none for all. Operands lie in simulated device
memory.
"""

import sys
import threading
import time

import hip
import matmul
import mori_sim
import peer
import rows
import torch


def on_device(*tensors):
    return [mori_sim.to_device(t) for t in tensors]


def addresses(*tensors):
    return [t.data_ptr() for t in tensors]


def same(got, wanted):
    assert torch.equal(got.view(torch.uint8), wanted.contiguous().view(torch.uint8)), (got, wanted)


def quantise():
    height, width = 7, 1024  # 7: the last workgroup has one row
    x = (torch.randn(height, width) * torch.logspace(-3, 3, height)[:, None]).bfloat16()
    x[height - 1] = 0  # a row of zeros must not divide by zero
    want_codes, want_scales = rows.quantised(x)
    (held,) = on_device(x)
    codes = mori_sim.zeros(height, width, dtype=torch.float8_e4m3fn)
    scales = mori_sim.zeros(height)
    y = mori_sim.zeros(height, width, dtype=torch.bfloat16)
    rows.quantiser(width)(*addresses(held, codes, scales), height, stream=0)
    rows.dequantiser(width)(*addresses(codes, scales, y), height, stream=0)
    mori_sim.synchronize()
    same(codes, want_codes)
    same(scales, want_scales)
    same(y, rows.dequantised(want_codes, want_scales))


def sum_slices():
    count = 256 * 8 * 3 + 40  # five packs more than whole rounds of the workgroups
    x = torch.randn(8, count).bfloat16()
    (held,) = on_device(x)
    y = mori_sim.zeros(count + 64, dtype=torch.bfloat16)
    rows.summer(8, 2)(held.data_ptr(), count * 2, y.data_ptr(), count // 8, stream=0)
    mori_sim.synchronize()
    same(y[:count], rows.summed(x))
    assert not y[count:].any()


def push(adds=True):
    world, height, row_bytes = 3, 2, 16 * 300
    slots = [mori_sim.zeros(world * height * row_bytes, dtype=torch.uint8) for _ in range(world)]
    flags = [mori_sim.zeros(world, dtype=torch.int32) for _ in range(world)]
    sent = [torch.randint(0, 256, (height * row_bytes,), dtype=torch.uint8) for _ in range(world)]
    slot_table = mori_sim.tensor(addresses(*slots))
    flag_table = mori_sim.tensor(addresses(*flags))
    held = on_device(*sent)
    launch = peer.pusher(row_bytes, adds)
    for rank in range(world):
        launch(
            *addresses(held[rank], slot_table, flag_table),
            rank,
            height * row_bytes,
            1,
            world,
            height,
            stream=0,
        )
    mori_sim.synchronize()
    for p in range(world):
        same(slots[p], torch.cat(sent))
        assert flags[p].tolist() == [height if adds else 1] * world


def push_set():
    push(adds=False)


def wait_for_host():
    """The kernel spins until a host thread raises the last flag."""
    flags, seen = mori_sim.empty(3, dtype=torch.int32, uncached=True), mori_sim.zeros(3, dtype=torch.int32)
    flags.copy_(torch.tensor([5, 6, 4]))
    stream, launch = (
        hip.stream().value,
        peer.awaiter(3),
    )  # held: a launcher that is dropped unloads its module, which waits
    launch(flags.data_ptr(), 5, seen.data_ptr(), stream=stream)
    time.sleep(0.1)
    assert mori_sim.pending()
    threading.Timer(0.05, lambda: flags.fill_(9)).start()
    mori_sim.synchronize()
    assert seen.tolist()[2] == 9


def wait_for_kernel():
    """Two streams: a kernel that waits and, launched after it, the kernel that signals."""
    row_bytes = 512
    source, slot = (
        on_device(torch.randint(0, 256, (row_bytes,), dtype=torch.uint8))[0],
        mori_sim.zeros(row_bytes, dtype=torch.uint8),
    )
    flags, seen = mori_sim.zeros(1, dtype=torch.int32), mori_sim.zeros(1, dtype=torch.int32)
    slot_table, flag_table = mori_sim.tensor([slot.data_ptr()]), mori_sim.tensor([flags.data_ptr()])
    first, second = hip.stream().value, hip.stream().value
    wait, push = peer.awaiter(1), peer.pusher(row_bytes, False)
    wait(flags.data_ptr(), 3, seen.data_ptr(), stream=first)
    time.sleep(0.05)
    assert mori_sim.pending()
    push(*addresses(source, slot_table, flag_table), 0, row_bytes, 3, 1, 1, stream=second)
    mori_sim.synchronize()
    assert seen.item() == 3
    same(slot, source)


def post():
    """A kernel posts COPY and ATOMIC to a real queue; the ring wraps one and a half times."""
    hip.open_kmt()
    queue = hip.SdmaQueue(0, 2, 512)
    words = queue.resource
    count, nbytes = 12, 1000
    source = on_device(torch.randint(0, 256, (count, nbytes), dtype=torch.uint8))[0]
    target = mori_sim.zeros(count, nbytes, dtype=torch.uint8)
    signal = mori_sim.zeros(1, dtype=torch.int64, uncached=True)
    launch = peer.poster(512)
    address = [hip.ctypes.cast(w, hip.c_void_p).value for w in (words.wptr, words.doorbell)]
    for i in range(count):
        launch(
            queue.ring,
            *address,
            source[i].data_ptr(),
            target[i].data_ptr(),
            nbytes,
            signal.data_ptr(),
            stream=0,
        )
        mori_sim.synchronize()
        deadline = time.monotonic() + 20
        while signal.item() <= i and time.monotonic() < deadline:
            time.sleep(0.0005)
    assert signal.item() == count
    assert queue.read == count * 64
    same(target, source)
    queue.close()


def check_product(got, want, magnitude, k):
    """Half a bf16 step of the result, plus what fp32 sums may lose."""
    bound = want.abs() * 2.0**-8 + magnitude * (k / 128 + 8) * 2.0**-24
    assert ((got.double() - want).abs() <= bound).all()
    equal = (got == want.bfloat16()).double().mean().item()
    assert equal > 0.98, equal


def product(make, m, n, k):
    operands, want, magnitude = matmul.block_scaled_problem(m, n, k, seed=m + n)
    held = on_device(*operands)
    out = mori_sim.zeros(m, n, dtype=torch.bfloat16)
    make(*addresses(*held, out), m, n, stream=0)
    mori_sim.synchronize()
    check_product(out, want, magnitude, k)


def matmul_wide():
    product(
        matmul.direct(384, True), 32, 144, 384
    )  # n = 144: two groups of columns with a scale of their own


def matmul_narrow():
    product(matmul.direct(384, False), 32, 144, 384)


def matmul_tracked():
    product(matmul.staged(640, False), 64, 128, 640)  # five steps: both buffers, and an odd end


def matmul_async():
    product(matmul.staged(640, True), 64, 128, 640)


def matmul_mixed(by_atom=False):
    m, n, k = 32, 32, 384
    operands, want, magnitude = matmul.mixed_problem(m, n, k, seed=1)
    held = on_device(*operands)
    out = mori_sim.zeros(m, n)
    matmul.mixed(k, by_atom)(*addresses(*held, out), m, n, stream=0)
    mori_sim.synchronize()
    assert ((out.double() - want).abs() <= magnitude * 8 * 2.0**-24).all()


def matmul_mixed_atom():
    matmul_mixed(by_atom=True)


CHECKS = (
    quantise,
    sum_slices,
    push,
    push_set,
    wait_for_host,
    wait_for_kernel,
    post,
    matmul_wide,
    matmul_narrow,
    matmul_tracked,
    matmul_async,
    matmul_mixed,
    matmul_mixed_atom,
)

if __name__ == "__main__":
    assert not torch.cuda.is_available()  # without --torch-cuda torch is left alone
    for check in CHECKS:
        if not sys.argv[1:] or check.__name__ in sys.argv[1:]:
            torch.manual_seed(0)
            start = time.monotonic()
            check()
            print(f"ok {check.__name__} {time.monotonic() - start:.2f}s", flush=True)
