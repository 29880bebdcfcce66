"""The C++ core of the host and rocm targets. Arguments and results are plain numbers: addresses, ranks,
bytes, seconds.

Life of a communicator:
  1. Each rank makes one control page, `create_memory(CONTROL_BYTES)`, and sends the descriptor to its peers.
  2. `Fabric(rank, world_size, control_fds, pidfds)` maps all pages and starts the engine threads. The
     descriptors stay the caller's (inside they are mapped or duplicated) and may be closed right after.
  3. For a window each rank makes `create_memory(nbytes)`, exchanges descriptors, and calls `map_window`.
  4. Queues, signals, waits and the barrier work on addresses inside such windows.
  5. `fabric.close()` stops the engines and tells the peers that this rank has left. Any order of destruction
     is safe; a `Span` keeps its mapping alive after the window and the fabric are closed.

Every call that may block or copy releases the GIL, and a blocked one answers Ctrl-C. Every object may be used
by several threads. After a fork the child gets CoreError "forked" from all of them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

Comparison = Literal["<", "<=", "==", "!=", ">=", ">"]
SignalOp = Literal["set", "add"]
ErrorKind = Literal[
    # A wait that ended without what it waited for. All: what, waited_s, wanted, and by `what`
    #   "signal": address, seen, cmp, peer      "barrier": missing (ranks that have not come)
    #   "quiet", "ring_space": peer, index, seen (bytes done), dwords (of the packet the queue stands at)
    "timeout",
    "peer_died",  # and ranks: the dead ones
    "peer_left",  # and ranks: those that closed cleanly
    # A malformed packet, or one that reaches outside the windows. info: peer, index, reason (of mori_sdma.h),
    # address and nbytes of the refused access, dwords, offset_bytes of the packet in the stream
    "queue_fault",
    "queue_limit",  # info: requested, open, limit
    "bad_queue",  # info: peer, index, world_size, queues_per_peer
    "out_of_range",  # info: what, address, nbytes; base, stride, size of the nearest window, 0 without one
    "misaligned",  # info: what, address, alignment
    "bad_value",  # info: what, given, allowed
    "closed",  # info: what (as of a wait that was going on)
    "forked",  # info: owner_pid, pid
    "system",  # info: call, errno, error
    # Of the rocm target
    "missing_library",  # info: library, tried
    "driver",  # a call of the vendor's failed. info: call, code, error (the driver's words)
    "inert_queue",  # a queue whose probe did not come back. info: engine, how
    "not_importable",  # memory that cannot be a window. info: why
]

class CoreError(Exception):
    """Everything the core raises. It holds facts and no prose: mori_shmem.errors words them."""

    kind: ErrorKind
    info: dict[str, Any]

CONTROL_BYTES: int
MAX_COPY_BYTES: int  # what one COPY_LINEAR packet moves at most (0x3fffffe0)
MIN_RING_BYTES: int
PAGE_BYTES: int

def create_memory(nbytes: int, name: str = "mori") -> int:
    """A new descriptor of anonymous zero-filled memory (memfd, close-on-exec, size sealed); the caller owns
    it."""

def monotonic_ns() -> int:
    """The clock of TIMESTAMP packets: CLOCK_MONOTONIC, the same as time.monotonic_ns()."""

def sdma_library_path() -> str:
    """Where libmori_sdma.so lies; its header is include/mori_sdma.h beside it."""

def sum_bf16(out: int, sources: Sequence[int], num_elements: int) -> None:
    """out[i] = round_to_bf16(((s0[i] + s1[i]) + s2[i]) + ...) in fp32; addresses of contiguous bf16.

    `out` may be one of the sources. NaN stays NaN (0x7fc0); the rounding is to nearest even.
    """

def copy_past_cache(out: int, source: int, nbytes: int) -> None:
    """Copy with stores that go around the cache; the ranges do not overlap."""

_Map = tuple[int, int, int, int, int]  # address of int32 slots, rows, width, stride, null
_Code = tuple[str, int, int]  # kind, numbers in a row, numbers per scale (0: no scales)

def group_slots(ids: int, map: _Map, first: int, group_size: int, num_groups: int) -> list[int]: ...
def shift_slots(map: _Map, first: Sequence[int]) -> None: ...
def scatter_rows(map: _Map, fields: Sequence[tuple[int, int]], targets: Sequence[Sequence[int]]) -> None: ...
def copy_ranges(ranges: Sequence[tuple[int, int, int]]) -> None: ...
def sum_rows(
    out: int,
    out_kind: str,
    map: _Map,
    tables: Sequence[int],
    pitch: int,
    code: _Code,
    factors: int = 0,
    ids: int = 0,
) -> None: ...
def quantize_rows(out: int, rows: int, num_rows: int, code: _Code) -> None: ...
def row_bytes(code: _Code) -> int: ...
def count_ids(ids: int, num_ids: int, first: int, num: int, counts: int) -> None: ...
def repeated_launch(
    tensors: Sequence[tuple[type, object, int, Sequence[int], int, int] | None],
    launch: Sequence[int],
    owner: object,
    result: object,
    fault: int,
    device: int,
    current_device: Callable[[], int],
    current_stream: Callable[[int], int],
) -> Callable[..., object]:
    """See jit/repeated.py. tensors: type, dtype, device, shape, where its address goes, the address it must
    have (0: any). launch: addresses of cuLaunchKernelEx, its configuration, the function, the arguments, and
    the stream in the configuration, all held by `owner`. fault: of a word that is 0 while nothing is to be
    raised."""

def describe_packet(packet: bytes) -> dict[str, Any]:
    """The packet that starts at these bytes: packet (its name), reason ("ok", or why it is malformed),
    num_dwords and the fields func, dst, src, nbytes, value, compare."""

@final
class Span:
    """Bytes of a window, through the buffer protocol (writable, format "B"). Keeps the mapping alive."""

    address: int
    nbytes: int
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class Window:
    """All ranks' parts of one window in this process: rank r's part lies at base + r * stride."""

    base: int
    stride: int
    nbytes: int
    rank: int
    world_size: int
    closed: bool
    def span(self, rank: int, offset_bytes: int, nbytes: int) -> Span:
        """A view of nbytes of a rank's part. CoreError out_of_range where it does not fit."""

    def close(self) -> None:
        """Take the window out of the address space: queues may no longer touch it. Unmapped with the last
        span."""

@final
class Program:
    """Steps that can be submitted to any queue of their fabric, again and again. Addresses are checked as
    added."""

    num_packets: int
    nbytes: int  # of encoded packets
    def __init__(self, fabric: Fabric) -> None: ...
    def put(self, dst: int, src: int, nbytes: int) -> None: ...
    def put_2d(
        self, dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None: ...
    def fill(self, dst: int, pattern: int, nbytes: int) -> None:
        """nbytes (a multiple of 4, dst too) of a 32-bit pattern."""

    def signal(self, where: int, value: int, op: SignalOp = "set") -> None: ...
    def wait(self, where: int, value: int, cmp: Comparison = ">=") -> None:
        """The queue stands still until the low 32 bits at `where` compare. bad_value from 2**32 on."""

    def timestamp(self, where: int) -> None:
        """Eight bytes of monotonic_ns(), written in the queue's order."""

    def packets(self) -> bytes:
        """The encoded packets, for tests and for people."""

@final
class Queue:
    """An ordered copy queue. Each verb is submitted at once; `submit` publishes a program as one batch."""

    peer: int
    index: int
    ring_bytes: int
    submitted_bytes: int  # packet bytes published so far (monotonic)
    completed_bytes: int  # packet bytes executed so far
    def put(self, dst: int, src: int, nbytes: int) -> None: ...
    def put_2d(
        self, dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None: ...
    def fill(self, dst: int, pattern: int, nbytes: int) -> None: ...
    def signal(self, where: int, value: int, op: SignalOp = "set") -> None: ...
    def wait(self, where: int, value: int, cmp: Comparison = ">=") -> None: ...
    def timestamp(self, where: int) -> None: ...
    def submit(self, program: Program) -> None: ...
    def submit_raw(self, packets: bytes) -> None:
        """Publish bytes as they are, for tests: what is malformed stops the queue. A multiple of 4 bytes."""

    def quiet(self, timeout_s: float | None = None) -> None:
        """Return when all that was submitted before is done and visible. A dead rank ends it only where the
        queue stands at a wait."""

    def check(self) -> None:
        """Raise queue_fault if the queue has stopped."""

    def set_faults(self, *, drop_every: int = 0, delay_us: int = 0, reorder: bool = False) -> None:
        """Test hook. drop_every=n leaves out every n-th copy (1: all); delay_us sleeps before each copy;
        reorder lets the next signal overtake its copies, which land delay_us (at least 20000) later. All 0:
        honest again."""

@final
class Fabric:
    """One communicator's share of the machine: control pages, address space, queues and engine threads."""

    rank: int
    world_size: int
    num_engines: int
    queues_per_peer: int
    max_queues: int
    num_queues: int  # open now
    timeout_s: float  # used where a call's timeout_s is None; may be set
    closed: bool
    def __init__(
        self,
        rank: int,
        world_size: int,
        control_fds: Sequence[int],
        pidfds: Sequence[int],
        *,
        timeout_s: float = 30.0,
        num_engines: int = 1,
        queues_per_peer: int = 8,
        max_queues: int = 64,
        ring_bytes: int = 262144,
        spin_us: int = -1,
        inline_bytes: int = -1,
    ) -> None:
        """pidfds[p] is a pidfd of rank p's process, or -1 where there is none (its death then goes
        unnoticed). max_queues: of this rank, over all peers. spin_us: how long a wait spins before it sleeps
        (-1: chosen by ranks and cores). inline_bytes: what the submitting thread copies itself (-1: the
        measured default)."""

    def map_window(self, fds: Sequence[int], nbytes: int) -> Window:
        """Map all ranks' parts (fds in rank order, each of at least nbytes); queues and signals may reach
        them."""

    def open_queues(self, peer: int, indices: Sequence[int]) -> list[Queue]:
        """The queues (peer, index); open ones are returned again. All or none: queue_limit, bad_queue."""

    def signal(self, where: int, value: int, op: SignalOp = "set") -> None:
        """A direct store or add with release order on a 64-bit word, and a wake-up for the rank that owns
        it."""

    def read(self, where: int) -> int:
        """Acquire load of a 64-bit word."""

    def wait(
        self,
        where: int,
        value: int,
        cmp: Comparison = ">=",
        *,
        peer: int = -1,
        timeout_s: float | None = None,
    ) -> int:
        """Sleep until the 64-bit word compares (unsigned); acquire; returns the value seen. With `peer`, that
        rank's leaving or death ends the wait; with -1 any rank's death, but nobody's leaving."""

    def signal_all(self, where: Sequence[int], value: int) -> None:
        """`signal` of each word, with "set"."""

    def wait_all(
        self, where: Sequence[int], value: int, peers: Sequence[int], timeout_s: float | None = None
    ) -> list[int]:
        """`wait` with ">=" for each word, the i-th written by peers[i], under one deadline."""

    def wake(self, rank: int) -> None:
        """Wake the sleepers of a rank after plain stores into its window."""

    def barrier(self, timeout_s: float | None = None) -> None:
        """All ranks. Errors: timeout (missing: ranks that have not come), peer_died, peer_left."""

    def peer_states(self) -> list[Literal["starting", "alive", "left", "dead"]]: ...
    def serve(self) -> bool:
        """Run what this rank's queues hold, in this thread; False if there was nothing to do."""

    def close(self) -> None:
        """Stop the engines, mark this rank as left, let go of memory and descriptors. Twice is fine.
        Work that is still queued is dropped: call quiet() first where it matters."""

# ---- the rocm target: HIP and the copy engines; libraries are opened at the first call ----

Way = Literal["rocr", "hsakmt"]

def rocm_device_count() -> int: ...
def rocm_current_device() -> int: ...
def rocm_set_device(ordinal: int) -> None: ...
def rocm_take_error() -> str:
    """hipGetLastError: what this thread's last failing call of HIP said, "" for nothing; forgotten then."""

@final
class RocmDevice:
    """A GPU as one communicator uses it: its peers may be accessed, and its windows are known to packets."""

    ordinal: int
    bus_id: str
    def __init__(self, ordinal: int) -> None: ...
    def recommended_engines(self, way: Way, peer_bus_id: str) -> int:
        """The driver's choice of copy engines for copies to that GPU, a bit each; 0 for itself."""

    def write(self, to: int, bytes: bytes) -> None:
        """Into device memory; done on return."""

    def is_idle(self, stream: int) -> bool: ...
    def is_capturing(self, stream: int) -> bool: ...
    def write_value(self, stream: int, where: int, value: int) -> None:
        """64 bits, in the order of the stream."""

    def wait_value(self, stream: int, where: int, at_least: int) -> None: ...
    def synchronize(self, stream: int) -> None: ...

@final
class RocmWords:
    """Zeroed memory for words: "host" (the GPU reaches it), "uncached" (on the GPU), "signal" (8 bytes that a
    stream can wait for). The buffer is the host's only for "host"."""

    address: int
    nbytes: int
    def __init__(
        self, device: RocmDevice, nbytes: int, place: Literal["host", "uncached", "signal"]
    ) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class RocmPieces:
    """The mapped allocations that hold a range of device memory; their handles are kept as long as this
    lives. CoreError "not_importable" (why)."""

    lead: int
    sizes: list[int]
    def __init__(self, device: RocmDevice, address: int, nbytes: int) -> None: ...
    def export_fds(self) -> list[int]:
        """A descriptor of each; the caller owns them."""

@final
class RocmWindow:
    """All ranks' parts of a window in this process. Made with this rank's part mapped and zeroed; peers'
    parts come with import_peers, and from then on packets may touch the window."""

    base: int
    stride: int
    nbytes: int
    rank: int
    world_size: int
    closed: bool
    def __init__(
        self, device: RocmDevice, rank: int, world_size: int, nbytes: int, uncached: bool
    ) -> None: ...
    @staticmethod
    def imported(
        device: RocmDevice,
        rank: int,
        mine: RocmPieces,
        ranks: Sequence[tuple[int, Sequence[int], Sequence[int]]],
    ) -> RocmWindow:
        """A window of memory that others have allocated; `ranks` are everybody's (lead, sizes, fds)."""

    def export_fd(self) -> int:
        """A descriptor of this rank's part; the caller owns it. Not of imported memory."""

    def import_peers(self, fds: Sequence[int]) -> None:
        """In rank order; this rank's own is not looked at."""

    def span(self, rank: int, offset_bytes: int, nbytes: int) -> Span:
        """A view that keeps the mapping alive. Its buffer is the host's only on the software node."""

    def close(self) -> None: ...

@final
class RocmProgram:
    """Packets; the verbs of Program."""

    num_packets: int
    nbytes: int
    def __init__(self, device: RocmDevice) -> None: ...
    def put(self, dst: int, src: int, nbytes: int) -> None: ...
    def put_2d(
        self, dst: int, src: int, row_bytes: int, num_rows: int, dst_pitch: int, src_pitch: int
    ) -> None: ...
    def fill(self, dst: int, pattern: int, nbytes: int) -> None: ...
    def signal(self, where: int, value: int, op: SignalOp = "set") -> None: ...
    def wait(self, where: int, value: int, cmp: Comparison = ">=") -> None: ...
    def timestamp(self, where: int) -> None: ...
    def packets(self) -> bytes: ...

@final
class RocmQueue:
    """An SDMA queue. One thread at a time; csrc/rocm/queue.h tells what its words are for."""

    engine: int
    ring: int
    ring_bytes: int
    read_pointer: int
    write_pointer: int
    doorbell: int
    submitted_bytes: int
    completed_bytes: int  # taken by the engine; landed is what a mark says
    go: int
    joined: int
    fetched: int  # the word of the last fetch
    def __init__(
        self, device: RocmDevice, way: Way, engine: int, ring_bytes: int, for_kernels: bool
    ) -> None: ...
    def next_ticket(self) -> int: ...
    def probe(self, scratch: int, timeout_s: float) -> None:
        """Copy 64 bytes to `scratch` and back: inert_queue if they do not come."""

    def submit(self, program: RocmProgram, ticket: int, timeout_s: float) -> None:
        """With a ticket: once the word `go` has reached it. timeout (ring_space) if there is no room."""

    def mark(self, timeout_s: float) -> int: ...
    def reached(self, mark: int) -> bool: ...
    def fetch(self, address: int, timeout_s: float) -> int: ...
    def join(self, timeout_s: float) -> int:
        """What the word `joined` will be once all that was submitted is done."""
