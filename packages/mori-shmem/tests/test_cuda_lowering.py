"""The cuda target without a GPU: what steps become, in which order streams are told, how waits end.

A recorder stands in for the driver. It also executes what it is told on a dictionary of words, stream by
stream, so that waits, toggles and replays can be followed to their end.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import pathlib
import re
import types
from typing import Any

import pytest
from mori_shmem.core import CoreError
from mori_shmem.errors import ArgumentError, QueueLimitError, TransportInert
from mori_shmem.targets.cuda import devices, lowering
from mori_shmem.targets.cuda.fabric import Fabric
from mori_shmem.targets.cuda.queue import Program
from mori_shmem.targets.cuda.stream_calls import MAX_PITCH_BYTES
from mori_shmem.targets.fault_record import BARRIER, FaultRecord

CALLER = 1


class Driver:
    """stream_calls.py on paper: every stream is a list of operations, executed when `advance` gets to
    them."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.told: list[tuple[Any, ...]] = []
        self.streams: dict[int, list[tuple[Any, ...]]] = {CALLER: []}
        self.done: dict[int, int] = {}  # event -> number of its newest record that has happened
        self.recorded: dict[int, int] = {}
        self._handles = itertools.count(100)

    def __getattr__(self, name: str) -> Any:
        def operation(stream: int, *arguments: int) -> None:
            self.told.append((name, stream, *arguments))
            self.streams[stream].append((name, *arguments))

        return operation

    def use_context(self, device: int) -> None:
        pass

    def new_stream(self) -> int:
        handle = next(self._handles)
        self.streams[handle] = []
        return handle

    def new_event(self) -> int:
        return next(self._handles)

    def drop_stream(self, stream: int) -> None:
        del self.streams[stream]

    def drop_event(self, event: int) -> None:
        pass

    def record(self, event: int, stream: int) -> None:
        self.recorded[event] = self.recorded.get(event, 0) + 1
        self.streams[stream].append(("event", event, self.recorded[event]))

    def follow(self, stream: int, event: int) -> None:
        self.streams[stream].append(("follow", event, self.recorded[event]))

    def has_happened(self, event: int) -> bool:
        self.advance()
        return self.done.get(event, 0) >= self.recorded.get(event, 0)

    def is_idle(self, stream: int) -> bool:
        self.advance()
        return not self.streams[stream]

    def fetch(self, stream: int, host_address: int, address: int, nbytes: int) -> None:
        ctypes.c_uint64.from_address(host_address).value = self.words.get(address, 0)

    def launch(self, name: str, stream: int, *arguments: int, **_: int) -> None:
        """As `kernels`."""
        self.told.append((name, stream, *arguments))
        self.streams[stream].append((name, *arguments))

    def advance(self) -> None:
        """Let every stream run as far as it can."""
        moved = True
        while moved:
            moved = False
            for work in self.streams.values():
                while work and self._execute(*work[0]):
                    work.pop(0)
                    moved = True

    def _execute(self, name: str, a: int, b: int = 0, *rest: int) -> bool:
        if name == "event":
            self.done[a] = b
        elif name == "follow":
            return self.done.get(a, 0) >= b
        elif name == "wait_at_least":
            return self.words.get(a, 0) >= b
        elif name == "wait_equal":
            return self.words.get(a, 0) == b
        elif name == "write":
            self.words[a] = b
        elif name == "add":
            self.words[a] = self.words.get(a, 0) + b
        elif name == "copy":
            self.words[a] = self.words.get(b, 0)
        return True


class PaperFabric(Fabric):
    """A fabric of rank 0 of 2 whose GPU is a Driver."""

    capturing = False

    def __init__(self, connections: int = 32) -> None:
        import torch

        self.driver = Driver()
        self.states = ["alive", "alive"]
        control: Any = types.SimpleNamespace(
            rank=0, world_size=2, queues_per_peer=8, peer_states=lambda: self.states,
            barrier=lambda timeout_s: None, close=lambda: None,
        )  # fmt: skip
        group: Any = types.SimpleNamespace(close=lambda: None)
        record = FaultRecord(torch.zeros(8, dtype=torch.int32))
        super().__init__(
            control, torch.device("cpu"), group, self.driver, self.driver,
            timeout_s=0.3, connections=connections, record=record, landing=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def callers_stream(self) -> int:
        return CALLER

    def is_capturing(self) -> bool:
        return self.capturing


# ---- lowering ----


def test_rows_become_the_fewest_copies() -> None:
    assert lowering.put(1000, 2000, 0) == []
    assert lowering.put(1000, 2000, 1 << 33) == [("copy", (1000, 2000, 1 << 33))]
    assert lowering.put_2d(0, 9, 8, 1, 3, 5) == [("copy", (0, 9, 8))]  # one row: pitches mean nothing
    assert lowering.put_2d(0, 900, 8, 4, 8, 8) == [("copy", (0, 900, 32))]
    assert lowering.put_2d(0, 900, 8, 4, 16, 8) == [("copy_rows", (0, 900, 8, 4, 16, 8))]
    assert lowering.put_2d(0, 900, 8, 0, 16, 8) == []
    far = MAX_PITCH_BYTES + 1
    assert lowering.put_2d(0, 9, 8, 3, far, 16) == [("copy", (r * far, 9 + r * 16, 8)) for r in range(3)]


@pytest.mark.parametrize(
    ("operations", "refused"),
    [
        (lowering.signal(8, 1, "set") + lowering.signal(8, 0, "set"), False),
        (lowering.wait(8, 1, ">=") + lowering.wait(8, 0, "=="), False),
        (lowering.signal(8, 1 << 40, "add"), False),
        (lowering.signal(8, 2, "set"), True),
        (lowering.wait(8, 2, ">="), True),
        (lowering.wait(8, 7, "=="), True),
    ],
)
def test_GA_5_only_what_is_right_on_every_replay_goes_into_a_graph(
    operations: list[lowering.Operation], refused: bool
) -> None:
    if refused:
        with pytest.raises(ArgumentError, match="the same on every replay"):
            lowering.check_replayable(operations)
    else:
        lowering.check_replayable(operations)


def test_faults_drop_delay_and_reorder() -> None:
    steps = lowering.put(1, 2, 8) + lowering.put(3, 4, 8) + lowering.signal(5, 1, "set")
    names = lambda fault: [name for name, _ in fault.apply(steps)]  # noqa: E731
    assert names(lowering.Faults()) == ["copy", "copy", "write"]
    assert names(lowering.Faults(drop_every=1)) == ["write"]
    assert names(lowering.Faults(drop_every=2)) == ["copy", "write"]
    assert names(lowering.Faults(delay_us=5)) == ["delay", "copy", "delay", "copy", "write"]
    assert names(lowering.Faults(reorder=True)) == ["write", "delay", "copy", "copy"]


# ---- queues ----


def test_a_submit_forks_off_the_callers_stream_and_join_comes_back() -> None:
    fabric = PaperFabric()
    (queue,) = fabric.open_queues(1, [0])
    driver = fabric.driver
    driver.words[10] = 0
    driver.streams[CALLER].append(("wait_at_least", 10, 1))  # the caller's stream is busy
    driver.streams[CALLER].append(("write", 20, 5))  # ... and then produces
    queue.put(30, 20, 8)
    queue.join()
    driver.streams[CALLER].append(("copy", 40, 30))  # ... and consumes
    driver.advance()
    assert 30 not in driver.words  # nothing was copied before it was there
    assert queue.is_busy()
    driver.words[10] = 1
    driver.advance()
    assert driver.words[30] == driver.words[40] == 5
    assert not queue.is_busy()
    assert fabric.open_queues(1, [0]) == [queue]


def test_a_program_is_lowered_once_and_keeps_its_order() -> None:
    fabric = PaperFabric()
    (queue,) = fabric.open_queues(1, [0])
    program = Program()
    program.wait(1, 1)
    program.signal(1, 0)
    program.put(2, 3, 8)
    program.signal(4, 1, "add")
    for _ in range(2):
        queue.submit(program)
    once = [("wait_at_least", 1, 1), ("write", 1, 0), ("copy", 2, 3, 8), ("add", 4, 1)]
    assert [(name, *rest) for name, _, *rest in fabric.driver.told] == 2 * once
    with pytest.raises(ArgumentError, match="no clock that agrees"):
        program.timestamp(8)


def test_in_a_capture_stale_values_are_refused_before_anything_is_told() -> None:
    fabric = PaperFabric()
    (queue,) = fabric.open_queues(1, [0])
    fabric.capturing = True
    for action in (
        lambda: queue.signal(8, 7),
        lambda: queue.wait(8, 7),
        lambda: fabric.signal(8, 7),
        lambda: queue.quiet(),
        lambda: fabric.barrier(),
        lambda: fabric.wait(8, 0),
        lambda: fabric.read(8),
    ):
        with pytest.raises(ArgumentError, match=r"replay|captured"):
            action()
    assert fabric.driver.told == []
    assert not any(fabric.driver.streams.values())


def test_GA_5_toggles_lose_and_double_nothing_in_any_mix_of_replays_and_eager_calls() -> None:
    """Two ranks on one driver: the sender's and the receiver's program of lowering.py's proof, run in every
    order of
    how far each stream gets."""
    driver = Driver()
    sender, receiver = driver.new_stream(), driver.new_stream()
    source, landing, arrived, free, count = 1, 2, 3, 4, 5
    driver.words[free] = 1
    send = [("wait_at_least", free, 1), ("write", free, 0), ("copy", landing, source), ("write", arrived, 1)]
    receive = [
        ("wait_at_least", arrived, 1), ("write", arrived, 0), ("add", count, 1), ("write", free, 1),
    ]  # fmt: skip
    for call in range(1, 200):
        driver.words[source] = call
        if call % 3:  # the receiver comes first, or the sender does, or both are two calls behind
            driver.streams[receiver] += receive
            driver.streams[sender] += send
        else:
            driver.streams[sender] += send
            driver.advance()
            driver.streams[receiver] += receive
        driver.advance()
        assert driver.words[landing] == call
        assert driver.words[count] == call
        assert (driver.words[arrived], driver.words[free]) == (0, 1)


def test_SH_4_queues_without_a_hardware_queue_are_refused() -> None:
    fabric = PaperFabric(connections=8)
    fabric.open_queues(1, [0, 1, 2, 3])
    with pytest.raises(
        QueueLimitError, match=r"number 5 .*8 hardware queues.*CUDA_DEVICE_MAX_CONNECTIONS=32"
    ):
        fabric.open_queues(1, [4])
    assert len(fabric.open_queues(1, [0, 1, 2, 3])) == 4  # nothing was lost


# ---- waits of the host ----


def test_words_are_read_after_my_own_signals() -> None:
    fabric = PaperFabric()
    fabric.signal(16, 10)
    fabric.signal(16, 32, "add")
    assert fabric.read(16) == 42
    fabric.driver.words[16] = (1 << 64) - 1
    assert fabric.read(16) == (1 << 64) - 1
    assert fabric.wait(16, 5, ">") == (1 << 64) - 1


def _facts(action: Any) -> tuple[str, dict[str, Any]]:
    with pytest.raises(CoreError) as error:
        action()
    return error.value.kind, error.value.info


def test_SH_6_a_wait_ends_at_its_deadline_with_the_facts() -> None:
    fabric = PaperFabric()
    fabric.driver.words[16] = 3
    kind, info = _facts(lambda: fabric.wait(16, 4, peer=1, timeout_s=0.05))
    assert (kind, info["seen"], info["wanted"], info["peer"], info["address"]) == ("timeout", 3, 4, 1, 16)
    (queue,) = fabric.open_queues(1, [0])
    queue.wait(16, 4)
    kind, info = _facts(lambda: queue.quiet(0.05))
    assert (kind, info["what"], info["peer"], info["index"]) == ("timeout", "quiet", 1, 0)


def test_SH_7_death_ends_waits_and_leaving_those_that_need_the_peer() -> None:
    fabric = PaperFabric()
    fabric.states[1] = "left"
    assert _facts(lambda: fabric.wait(16, 4, peer=1))[0] == "peer_left"
    assert _facts(lambda: fabric.wait(16, 4, timeout_s=0.05))[0] == "timeout"
    fabric = PaperFabric()
    fabric.states[1] = "dead"
    assert fabric.wait(16, 0, peer=1) == 0  # what is there is there
    assert _facts(lambda: fabric.wait(16, 4, peer=1))[1]["ranks"] == [1]
    (queue,) = fabric.open_queues(1, [0])
    queue.put(24, 16, 8)
    queue.quiet()  # needs nobody
    queue.wait(16, 4)
    kind, info = _facts(lambda: queue.quiet(30))
    assert (kind, info["ranks"], info["what"]) == ("peer_died", [1], "quiet")


def test_a_fault_record_fails_the_next_wait_and_is_told_once() -> None:
    fabric = PaperFabric()
    words = fabric.record.memory
    words[1:] = torch_words(0, 1, BARRIER, 0, 4, 5, 0)
    fabric.check()  # not published yet
    words[0] = 1
    kind, info = _facts(lambda: fabric.barrier())
    assert (kind, info["what"], info["purpose"]) == ("timeout", "kernel", "the device barrier")
    assert (info["peer"], info["seen"], info["wanted"]) == (1, 4, 5)
    fabric.barrier()


def torch_words(*values: int) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32)


# ---- environment ----


def test_the_environment_is_set_before_cuda_starts_and_counted_after(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv(devices.CONNECTIONS, raising=False)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert devices.prepare_environment() == 8
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"  # never multicast, whatever was asked
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert devices.prepare_environment() == 32
    for text, number in (("16", 16), ("64", 32), ("0", 8), ("many", 8)):
        monkeypatch.setenv(devices.CONNECTIONS, text)
        assert devices.prepare_environment() == number


def test_sharing_a_gpu_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(devices.OVERLAP, raising=False)
    devices.check_devices(0, ["a", "b", "c"])
    with pytest.raises(TransportInert, match=r"ranks \[0, 2\] share GPUs.*set_device\(LOCAL_RANK\)"):
        devices.check_devices(1, ["a", "b", "a"])
    monkeypatch.setenv(devices.OVERLAP, "1")
    devices.check_devices(1, ["a", "b", "a"])


# ---- torch's rendezvous over our own sockets ----


def test_SH_2_the_rendezvous_store_needs_no_common_count_of_keys() -> None:
    """What torch does at a rendezvous, on ranks whose counters differ, through a store that it can call
    from C++."""

    def rank() -> list[bytes]:
        import mori_shmem
        from mori_shmem.deadline import Deadline
        from mori_shmem.targets.cuda.memory import Group, _turn

        with mori_shmem.init("host") as comm:
            group = Group(comm._mesh, "a group of the test", Deadline(10))
            from torch._C._distributed_c10d import _resolve_process_group

            torch_group: Any = _resolve_process_group("a group of the test")  # type: ignore[arg-type]
            assert (torch_group.rank(), torch_group.size()) == (comm.rank, comm.world_size)
            from torch.distributed import PrefixStore

            store = PrefixStore("by way of C++", torch_group.get_group_store())
            first = 100 * comm.rank
            gathered = []
            for count in range(first, first + 3):
                with _turn(comm._mesh, group._pids, Deadline(10)):
                    store.set(f"CUDASymmetricMemory/{count}/{comm.rank}", f"{count - first}/{comm.rank}")
                    for peer in range(comm.world_size):
                        store.wait([f"CUDASymmetricMemory/{count}/{peer}"])
                        gathered.append(bytes(store.get(f"CUDASymmetricMemory/{count}/{peer}")))
            group.close()
            return gathered

    import mori_shmem

    expected = [f"{count}/{peer}".encode() for count in range(3) for peer in range(3)]
    assert mori_shmem.run_ranks(rank, 3) == [expected] * 3


# ---- kernels and headers, compiled where a compiler is ----


def test_the_ptx_assembles_for_hopper_without_spills() -> None:
    import subprocess

    import mori_shmem.targets.cuda as cuda

    triton_nvidia = pytest.importorskip("triton.backends.nvidia")
    ptxas = pathlib.Path(next(iter(triton_nvidia.__path__))) / "bin" / "ptxas"
    source = pathlib.Path(cuda.__file__).with_name("kernels.ptx")
    for architecture in ("sm_70", "sm_90"):
        done = subprocess.run(
            [ptxas, f"-arch={architecture}", "-v", source, "-o", "/dev/null"], capture_output=True, text=True
        )
        if "Unsupported .target" in done.stderr or "not defined for option" in done.stderr:
            continue  # CUDA 13 has left sm_70 behind
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("0 bytes spill stores") == 4


def test_the_cuda_helpers_compile(tmp_path: pathlib.Path) -> None:
    from mori_shmem.jit import Source, Variant, build, cuda_headers, resources
    from mori_shmem.jit.cache import Cache
    from mori_shmem.jit.compilers import CompilerMissing, compiler_named

    file = tmp_path / "k.cu"
    file.write_text("""
      #include "words.cuh"
      extern "C" __global__ void k(Window window, Limits limits, uint64_t* count, uint64_t* out) {
        bool met = all_ranks_meet(window, 0, count, limits, 7);
        if (threadIdx.x) return;
        add_to_word<SYSTEM>((uint64_t*)peer_pointer(window, 0), 1);
        set_word<DEVICE_SCOPE>(out, met && wait_word<SYSTEM>(out + 1, 5, limits, 0, 3, 1));
      }""")
    try:
        compiler = compiler_named("nvrtc")
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    variant = Variant("mori-shmem", Source.read(file, [cuda_headers()]), (), "sm_90a")
    used = resources.kernels_of(build(variant, compiler=compiler, cache=Cache(None)))
    assert used["k"].stack_bytes == 0


@pytest.mark.parametrize("num_warps", [1, 4])
def test_the_triton_helpers_compile_with_order_and_scope(num_warps: int) -> None:
    """What the GPU tests and the bench run, for sm_90, by whatever Triton is here."""
    pytest.importorskip("triton")
    import importlib.util

    from mori_shmem.bench.cuda.kernels import ping_pong
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    file = pathlib.Path(__file__).with_name("cuda_kernels.py")
    spec = importlib.util.spec_from_file_location("cuda_kernels", file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    everything: dict[str, str] = {
        "table": "*i64", "count": "*i64", "record": "*i32", "out": "*i64", "timeout_ns": "i64",
        **dict.fromkeys(("wanted", "rank", "peer", "world", "words", "value", "timeout_ms", "turns"), "i32"),
    }  # fmt: skip
    for kernel, fixed in (
        (kernels.meet_and_signal, {}),
        (kernels.produce, {"n": 1024, "chunks": 8}),
        (ping_pong, {"first": 0}),
        (ping_pong, {"first": 1}),
    ):
        signature = {name: everything.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constexprs=fixed)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        ptx = made.asm["ptx"]
        assert re.search(r"(ld|atom).global.*sys.*acquire|(ld|atom).acquire.sys", ptx)
        assert re.search(r"atom.global.*sys.*release|atom.release.sys", ptx)
