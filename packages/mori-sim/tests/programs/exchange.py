"""Ranks as processes, each with one simulated device: VMM windows, SDMA queues, and a kernel that pushes.

    exchange.py sdma|early|kernel RANKS STEPS [CODE_OBJECT]

Everybody writes a block to everybody, every step, with a signal behind it; every byte is checked by its
receiver. `early` is the mistake: the signal goes before the data. Ranks are forked before anything touches
the node, and hand their windows to each other as file descriptors.
"""

import array
import os
import socket
import struct
import sys
import time
from ctypes import c_int, c_uint64
from pathlib import Path

import hip

BLOCK = 24 << 10  # bytes of one block
ROWS, ROW_BYTES = 2, 4800  # what the push kernel of examples.py was compiled for
SIGNALS = 1 << 20  # where they start in each window
DEADLINE_S = 60


def pattern(sender: int, receiver: int, step: int, nbytes: int = BLOCK) -> bytes:
    seed = bytes((sender * 31 + receiver * 7 + step * 13 + i) % 256 for i in range(256))
    return (seed * (nbytes // 256 + 1))[:nbytes]


def send_window(sockets: dict[int, socket.socket], fd: int) -> None:
    for s in sockets.values():
        s.sendmsg([b"w"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def receive_window(s: socket.socket) -> int:
    _, ancillary, _, _ = s.recvmsg(1, socket.CMSG_LEN(4))
    return int(struct.unpack("i", ancillary[0][2][:4])[0])


def meet(sockets: dict[int, socket.socket]) -> None:
    for s in sockets.values():
        s.sendall(b"b")
    for s in sockets.values():
        assert s.recv(1) == b"b", "a peer has ended"


def wait_signals(window: hip.Window, ranks: int, value: int) -> None:
    signals = hip.view(window.at(window.rank, SIGNALS), 8 * ranks).cast("Q")
    end = time.monotonic() + DEADLINE_S
    while True:
        late = [p for p in range(ranks) if signals[p] < value]
        if not late:
            return
        assert time.monotonic() < end, (
            f"rank {window.rank}: no signal {value} from ranks {late}: {signals.tolist()}"
        )
        time.sleep(0.0002)


def put_by_sdma(
    rank: int, ranks: int, steps: int, window: hip.Window, source: int, sockets: dict[int, socket.socket]
) -> None:
    hip.open_kmt()
    queues = {}
    for p in range(ranks):
        mask = hip.recommended_engines(rank, p, ranks) if p != rank else 1
        queues[p] = hip.SdmaQueue(rank, (mask & -mask).bit_length() - 1, 1024)
    for step in range(1, steps + 1):
        for p in range(ranks):
            hip.view(source + p * BLOCK, BLOCK)[:] = pattern(rank, p, step)
        for p, queue in queues.items():
            third = BLOCK // 3
            copies = [
                hip.copy_packet(window.at(p, rank * BLOCK + i * third), source + p * BLOCK + i * third, third)
                for i in range(3)
            ]
            signal = hip.add64_packet(window.at(p, SIGNALS + 8 * rank), 1)
            queue.post(*([signal, *copies] if sys.argv[1] == "early" else [*copies, signal]))
        check_step(rank, ranks, step, window, sockets)


def put_by_kernel(
    rank: int,
    ranks: int,
    steps: int,
    window: hip.Window,
    source: int,
    sockets: dict[int, socket.socket],
    code: Path,
) -> None:
    """One launch pushes the same rows to every peer; the kernel adds 1 to the peer's flag for each row."""
    module = hip.KernelModule(code)
    slots, flags = hip.malloc(8 * ranks), hip.malloc(8 * ranks)
    hip.view(slots, 8 * ranks).cast("Q")[:] = array.array("Q", [window.at(p) for p in range(ranks)])
    # The kernel's flags are 4 bytes apart and our signals 8: half of the way is ours.
    hip.view(flags, 8 * ranks).cast("Q")[:] = array.array(
        "Q", [window.at(p, SIGNALS + 4 * rank) for p in range(ranks)]
    )
    name = code.name.split("-")[0]
    for step in range(1, steps + 1):
        hip.view(source, ROWS * ROW_BYTES)[:] = pattern(rank, 0, step, ROWS * ROW_BYTES)
        tables = (c_uint64(source), c_uint64(slots), c_uint64(flags))
        module.launch(name, (ranks, ROWS, 1), 256, *tables, c_int(rank), c_uint64(BLOCK), c_int(1))
        hip.synchronize()
        check_step(rank, ranks, step, window, sockets, per_step=ROWS, nbytes=ROWS * ROW_BYTES, receiver=0)


def check_step(
    rank: int,
    ranks: int,
    step: int,
    window: hip.Window,
    sockets: dict[int, socket.socket],
    *,
    per_step: int = 1,
    nbytes: int = BLOCK,
    receiver: int | None = None,
) -> None:
    wait_signals(window, ranks, step * per_step)
    for p in range(ranks):
        got = bytes(hip.view(window.at(rank, p * BLOCK), nbytes))
        want = pattern(p, rank if receiver is None else receiver, step, nbytes)
        assert got == want, f"rank {rank}, step {step}: wrong bytes from rank {p}"
    meet(sockets)


def rank_main(rank: int, ranks: int, sockets: dict[int, socket.socket]) -> None:
    how, steps = sys.argv[1], int(sys.argv[3])
    os.environ["RANK"] = str(rank)
    hip.call("hipSetDevice", rank)
    window = hip.Window(hip.GRANULE, rank, ranks, rank, uncached=True)
    hip.view(window.at(rank, SIGNALS), 8 * ranks)[:] = bytes(8 * ranks)
    send_window(sockets, window.export())
    for p, s in sockets.items():
        window.bring_in(p, receive_window(s))
    source = hip.malloc(ranks * BLOCK)
    meet(sockets)
    if how in ("sdma", "early"):
        put_by_sdma(rank, ranks, steps, window, source, sockets)
    else:
        put_by_kernel(rank, ranks, steps, window, source, sockets, Path(sys.argv[4]))
    hip.synchronize()
    window.close()
    print(f"ok rank {rank}", flush=True)


def main() -> int:
    ranks = int(sys.argv[2])
    pairs = {(a, b): socket.socketpair() for a in range(ranks) for b in range(a + 1, ranks)}
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            own = {}
            for (a, b), (first, second) in pairs.items():
                if rank in (a, b):
                    own[b if rank == a else a] = first if rank == a else second
            rank_main(rank, ranks, own)
            sys.exit(0)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return 0 if not any(codes) else 1


if __name__ == "__main__":
    sys.exit(main())
