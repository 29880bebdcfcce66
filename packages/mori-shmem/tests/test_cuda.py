"""The cuda target on GPUs. gpu(1): all ranks share one device; gpu(2): one device a rank.

Run with `tools/gpu_run pytest -m gpu packages/mori-shmem`. Each test says which fault it is about; the
functions that run in the ranks hold the assertions. What a queue promises on every target stands in
test_queue_contract.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    PeerDied,
    PeerTimeout,
    QueueLimitError,
    TransportInert,
)
from mori_shmem.testing import die, faults, open_fds, run_ranks_to_the_end

KERNELS = os.path.join(os.path.dirname(__file__), "cuda_kernels.py")
one_gpu, two_gpus = pytest.mark.gpu(1), pytest.mark.gpu(2)
on_both = pytest.mark.parametrize(
    "spread",
    [pytest.param(False, marks=one_gpu, id="sharing"), pytest.param(True, marks=two_gpus, id="spread")],
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("MORI_SHMEM_BACKEND", "cuda")


def run(fn: Callable[..., Any], world_size: int, *args: object, spread: bool = True) -> list[Any]:
    """run_ranks, with one device a rank or all on the first one."""
    return mori_shmem.run_ranks(_placed, world_size, fn, spread, *args, timeout_s=60)


def _placed(fn: Callable[..., Any], spread: bool, *args: object) -> Any:
    if not spread:
        import torch

        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        torch.cuda.set_device(0)
    return fn(*args)


# ---- the transport proves itself ----


@on_both
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_honest_transport_passes_the_self_test(world_size: int, spread: bool) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            assert (comm.backend, comm.device.type) == ("cuda", "cuda")
            comm.queue((comm.rank + 1) % comm.world_size, 1)
            comm.self_test()
            comm.self_test()

    run(rank, world_size, spread=spread)


@one_gpu
def test_GA_6_dropped_and_reordered_copies_are_noticed_and_named() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            for fault, found in (
                ({"drop_every": 1}, "16384 of 16384 bytes never came"),
                ({"reorder": True, "delay_us": 20_000}, "came after the signal that follows them"),
            ):
                mine = fault if comm.rank == 1 else {}
                with faults(comm, **mine), pytest.raises(TransportInert, match=found) as inert:
                    comm.self_test()
                assert "rank 1 -> rank 0 (queue 0)" in str(inert.value)
                assert "rank 0 -> rank" not in str(inert.value)
            comm.self_test()

    run(rank, 2, spread=False)


@one_gpu
def test_what_is_closed_or_not_there_is_refused_and_views_live_on() -> None:
    def rank() -> None:
        import torch

        with mori_shmem.init() as comm:
            window, queue = comm.alloc(4096), comm.queue(0)
            with pytest.raises(ArgumentError, match="no clock that agrees"):
                queue.timestamp(window.at(0))
            view = window.peer(0).tensor(8, torch.uint8)
            window.close()
            assert view.sum() >= 0
            with pytest.raises(ClosedError):
                queue.put(window.at(0), window.at(64), 8)
        with pytest.raises(ClosedError):
            comm.alloc(8)

    run(rank, 1)


@one_gpu
def test_SH_1_large_copies_and_high_offsets_are_exact() -> None:
    def rank() -> None:
        import torch

        def ramp(nbytes: int) -> torch.Tensor:
            return ((torch.arange(nbytes, device="cuda") * 131) % 251).to(torch.uint8)

        with mori_shmem.init() as comm:
            window = comm.alloc((1 << 32) + (1 << 21))
            part, queue = window.tensor((1 << 32) + (1 << 21), torch.uint8), comm.queue(0)
            nbytes = (1 << 30) + 16
            part[:nbytes].copy_(ramp(nbytes))
            queue.put(window.at(1 << 31), window.at(0), nbytes)
            queue.join()
            assert torch.equal(part[1 << 31 : (1 << 31) + nbytes], part[:nbytes])
            low = part[4096:8192].clone()
            for high in (1 << 31, 1 << 32):
                part[:4096].copy_(ramp(4096) + high % 7 + 1)
                queue.put(window.at(high + 4096), window.at(0), 4096)
                queue.join()
                assert torch.equal(part[high + 4096 : high + 8192], part[:4096])
                assert torch.equal(part[4096:8192], low)

    run(rank, 1)


# ---- SH-2, SH-3, SH-4 ----


@one_gpu
def test_SH_2_communicators_and_groups_live_side_by_side() -> None:
    def rank() -> None:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = groups[dist.get_rank() // 2]
        a, b = mori_shmem.init(group=mine, name="a"), mori_shmem.init(group=mine, name="b")
        whole = mori_shmem.init()  # of all four
        if dist.get_rank() < 2:  # the ranks of the first group make more windows than the others
            a.alloc(4096)
        wa, wb, ww = a.alloc(4096), b.alloc(4096), whole.alloc(4096)
        peer = 1 - a.rank

        def round_of(comm: Any, window: Any, value: int) -> None:
            window.tensor(1, torch.int64).fill_(value)
            comm.queue(peer).put(window.at(8, peer), window.at(0), 8)
            comm.queue(peer).signal(window.at(16, peer), value + 1)
            comm.wait(window.at(16), value + 1, peer=peer)
            assert int(window.tensor(1, torch.int64, 8)) == value
            comm.barrier()

        for i in range(100):
            round_of(a, wa, 2 * i)
            round_of(b, wb, 2 * i + 1)
        a.close()
        for i in range(100, 125):
            round_of(b, wb, 2 * i + 1)
        after = (whole.rank + 1) % 4
        whole.queue(after).signal(ww.at(0, after), 7)
        whole.wait(ww.at(0), 7)
        whole.barrier()
        b.close()
        whole.close()
        dist.destroy_process_group()

    run(rank, 4, spread=False)


@one_gpu
def test_SH_2_eight_threads_make_communicators_at_once() -> None:
    def rank() -> None:
        import threading

        failed: list[BaseException] = []

        def make(i: int) -> None:
            try:
                with mori_shmem.init(name=f"thread {i}", max_queues=1) as comm:
                    comm.alloc(4096)
                    comm.barrier()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=make, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    run(rank, 2, spread=False)


@one_gpu
def test_SH_3_create_and_destroy_give_everything_back() -> None:
    def rank() -> None:
        import torch

        def state() -> tuple[int, int]:
            return len(open_fds()), torch.cuda.mem_get_info()[0]

        for i in range(120):
            with mori_shmem.init() as comm:
                window = comm.alloc(1 << 20)
                comm.queue(0).put(window.at(4096), window.at(0), 4096)
                comm.queue(0).quiet()
            del window, comm
            if i == 4:
                fds, free = state()
        fds_now, free_now = state()
        assert abs(fds_now - fds) <= 2
        assert free - free_now <= 16 << 20

    run(rank, 1)


@one_gpu
def test_SH_4_queues_that_hardware_has_no_room_for_are_refused_with_the_reason() -> None:
    def rank() -> None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        with mori_shmem.init() as comm:
            for index in range(4):
                comm.queue(0, index)
            with pytest.raises(QueueLimitError, match=r"gives it 8 hardware queues.*CUDA_DEVICE_MAX_CONN"):
                comm.queue(0, 4)
            with pytest.raises(ArgumentError, match=r"valid are 0\.\.7"):
                comm.queue(0, 8)
            comm.self_test()

    run(rank, 1)


@one_gpu
def test_ranks_that_share_a_gpu_unasked_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")

    def rank() -> None:
        with pytest.raises(TransportInert, match=r"ranks \[0, 1\] share GPUs.*set_device"):
            mori_shmem.init()

    run(rank, 2, spread=False)


# ---- SH-6, SH-7 ----


@on_both
def test_SH_7_a_killed_rank_ends_waits_barriers_and_quiets_soon(spread: bool) -> None:
    def rank(spread: bool) -> float:
        if not spread:
            import torch

            torch.cuda.set_device(0)
        comm = mori_shmem.init(timeout_s=20)
        window = comm.alloc(4096)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.5)
            die()
        began = time.monotonic()
        queue = comm.queue(1)
        queue.wait(window.at(8), 1)  # nobody will ever write it
        for action in (
            lambda: comm.wait(window.at(0), 1, peer=1, what="the word of rank 1"),
            lambda: queue.quiet(),
            lambda: comm.barrier(),
        ):
            with pytest.raises(PeerDied, match="rank 1"):
                action()
        comm.close()  # with a queue that is stuck
        return time.monotonic() - began

    outcomes = run_ranks_to_the_end(rank, 2, spread, timeout_s=60)
    assert outcomes[0].error is None, outcomes[0].error
    assert outcomes[0].value < 6
    assert outcomes[1].error is not None


@on_both
def test_SH_6_a_stream_barrier_that_nobody_joins_fails_the_call(spread: bool) -> None:
    def rank() -> None:
        with mori_shmem.init(timeout_s=20) as comm:
            comm.stream_barrier()
            comm.barrier()
            if comm.rank == 0:
                comm.stream_barrier(timeout_s=0.5)
                with pytest.raises(PeerTimeout) as late:
                    comm.barrier()  # any wait of the host finds it
                assert (late.value.seen, late.value.wanted, late.value.peers) == (1, 2, (1,))
                for part in ("the device barrier from rank 1", ">= 2; it was 1", "MORI_TIMEOUT_S"):
                    assert part in str(late.value)
                comm.check()  # told once
                comm.barrier()
            else:
                time.sleep(1.0)
                comm.stream_barrier()  # rank 0 has come to it, in vain
                comm.barrier()
            comm.self_test()

    run(rank, 2, spread=spread)


# ---- GA-5: graphs ----


@on_both
def test_GA_5_programs_in_graphs_of_several_sizes_replay_in_any_order_between_eager_calls(
    spread: bool,
) -> None:
    """Each call: fill a source, put it, toggle `arrived` at the peer; whoever has consumed answers with a
    toggle, so
    that the next call may overwrite. Three sizes as graphs, and the same eagerly."""

    def call_sequence() -> None:
        import torch

        with mori_shmem.init(timeout_s=20) as comm:
            peer, most = 1 - comm.rank, 1 << 16  # numbers
            nbytes = 8 * most
            window = comm.alloc(2 * nbytes + 4096)
            source, landing = (window.tensor(most, torch.int64, at) for at in (0, nbytes))
            arrived, free = 2 * nbytes, 2 * nbytes + 8
            queue = comm.queue(peer)
            value = torch.zeros(1, dtype=torch.int64, device=comm.device)
            result = torch.zeros(most, dtype=torch.int64, device=comm.device)
            programs = {}
            for count in (1, 1000, most):
                send, receive = mori_shmem.PutProgram(), mori_shmem.PutProgram()
                send.wait(window.at(free), 1)  # the peer has consumed what I sent before ...
                send.signal(window.at(free), 0)
                send.put(window.at(nbytes, peer), window.at(0), 8 * count)
                send.signal(window.at(arrived, peer), 1)
                receive.wait(window.at(arrived), 1)
                receive.signal(window.at(arrived), 0)
                programs[count] = (send, receive)

            def call(count: int) -> None:
                send, receive = programs[count]
                source[:count].copy_(value.expand(count))
                queue.submit(send)
                queue.submit(receive)
                queue.join()
                result[:count].copy_(landing[:count])
                comm.signal(window.at(free, peer), 1)

            comm.signal(window.at(free, peer), 1)  # the first landing place is free
            comm.barrier()
            graphs = {}
            for count in programs:
                graph = torch.cuda.CUDAGraph()
                side = torch.cuda.Stream()
                with torch.cuda.graph(graph, stream=side):
                    call(count)
                graphs[count] = graph
            order = [most, 1, 1000, 1, most]
            round_ = 0
            for i in range(60):
                for count in order:
                    round_ += 1
                    value.fill_(round_ * 10 + comm.rank)
                    result.zero_()
                    if i % 3 == 2:
                        call(count)
                    else:
                        graphs[count].replay()
                    assert int(result[count - 1]) == round_ * 10 + peer, (i, count)
                    assert int(result.sum()) == count * (round_ * 10 + peer)
            for _ in range(100):
                round_ += 1
                value.fill_(round_ * 10 + comm.rank)
                graphs[1000].replay()
                assert int(result[999]) == round_ * 10 + peer
            comm.barrier()

    run(call_sequence, 2, spread=spread)


@on_both
def test_stream_barriers_in_graphs_and_eager_mix(spread: bool) -> None:
    def rank() -> None:
        import torch

        with mori_shmem.init(timeout_s=20) as comm:
            window = comm.alloc(4096)
            mine = window.tensor(1, torch.int64)
            theirs = [window.peer(p).tensor(1, torch.int64) for p in range(comm.world_size)]
            total = torch.zeros(1, dtype=torch.int64, device=comm.device)

            def call() -> None:
                mine.add_(comm.rank + 1)
                comm.stream_barrier()
                total.copy_(sum(theirs))
                comm.stream_barrier()

            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            per_call = sum(range(1, comm.world_size + 1))
            for i in range(2, 300):
                if i % 7 == 0:
                    call()
                else:
                    graph.replay()
                if i % 10 == 0:
                    assert int(total) == i * per_call, i
            comm.barrier()

    run(rank, 2, spread=spread)


@one_gpu
def test_what_a_graph_would_bake_in_is_refused() -> None:
    def rank() -> None:
        import torch

        with mori_shmem.init() as comm:
            window, queue = comm.alloc(4096), comm.queue(0)
            program = mori_shmem.PutProgram()
            program.signal(window.at(0), 7)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                torch.zeros(1, device="cuda")
                with pytest.raises(ArgumentError, match="the same on every replay"):
                    queue.submit(program)
                with pytest.raises(ArgumentError, match="the same on every replay"):
                    queue.wait(window.at(0), 2)
                with pytest.raises(ArgumentError, match="cannot be captured"):
                    queue.quiet()
                with pytest.raises(ArgumentError, match="stream_barrier"):
                    comm.barrier()
                queue.signal(window.at(8), 1, op="add")
                queue.join()
            for _ in range(5):
                graph.replay()
            queue.submit(program)
            queue.quiet()
            torch.cuda.synchronize()
            assert (comm.read(window.at(0)), comm.read(window.at(8))) == (7, 5)

    run(rank, 1)


# ---- GA-8: streams ----


@on_both
def test_GA_8_a_put_follows_the_callers_stream_and_join_orders_what_comes_after(spread: bool) -> None:
    def rank() -> None:
        import torch

        with mori_shmem.init(timeout_s=20) as comm:
            peer, n = 1 - comm.rank, 1 << 16
            window = comm.alloc(3 * 8 * n)
            source, landing = (window.tensor(n, torch.int64, at) for at in (0, 8 * n))
            queue, side = comm.queue(peer), torch.cuda.Stream()
            for i in range(60):
                with torch.cuda.stream(side):
                    torch.cuda._sleep(2_000_000)  # about a millisecond
                    made = torch.full((n,), 100 * i + comm.rank, device=comm.device)
                    source.copy_(made)
                    del made
                    queue.put(window.at(8 * n, peer), window.at(0), 8 * n)
                    queue.join()
                    source.fill_(-1)  # the copy must have been done
                    comm.stream_barrier()
                    got = landing.clone()
                    comm.stream_barrier()
                side.synchronize()
                assert torch.equal(got.cpu(), torch.full((n,), 100 * i + peer)), i

    run(rank, 2, spread=spread)


@two_gpus
def test_a_running_kernel_triggers_its_copies() -> None:
    """The kernel stores a chunk, releases its flag and waits for the peer's copy of the same chunk before it
    goes on: no copy could come if it had to wait for the end of the kernel."""

    def rank(file: str) -> None:
        import torch

        produce = _kernels(file).produce
        with mori_shmem.init(timeout_s=30) as comm:
            peer, n, chunks = 1 - comm.rank, 1024, 8
            window = comm.alloc(3 * 8 * n * chunks)
            words = 2 * 8 * n * chunks
            program = mori_shmem.PutProgram()
            for c in range(chunks):
                program.wait(window.at(words + 8 * c), 1)
                program.signal(window.at(words + 8 * c), 0)
                program.put(window.at(8 * n * (chunks + c), peer), window.at(8 * n * c), 8 * n)
                program.signal(window.at(words + 512 + 8 * c, peer), 1)
            table = torch.zeros(2, dtype=torch.int64, device=comm.device)
            table.copy_(torch.tensor(window.addresses))
            landing = window.tensor(n * chunks, torch.int64, 8 * n * chunks)

            # Load the kernel before a queue waits for it; its waits give up at once.
            produce[(1,)](table, comm.rank, words, 0, 0, comm.fault_record, n, chunks)
            torch.cuda.synchronize()
            with pytest.raises(PeerTimeout, match="flag 3/"):
                comm.check()
            window.tensor(128, torch.int64, words).zero_()
            comm.barrier()

            def call(start: int) -> None:
                comm.queue(peer).submit(program)
                produce[(1,)](table, comm.rank, words, start, 5000, comm.fault_record, n, chunks)
                comm.queue(peer).join()
                comm.stream_barrier()

            call(0)
            comm.barrier()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call(5)
            for i in range(40):
                if i % 4:
                    graph.replay()
                else:
                    call(100 * i)
                start = 5 if i % 4 else 100 * i
                expected = torch.arange(start, start + chunks).repeat_interleave(n)
                assert torch.equal(landing.cpu(), expected), i
                comm.barrier()

    run(rank, 2, KERNELS)


# ---- device helpers ----


@on_both
def test_triton_helpers_meet_signal_and_give_up(spread: bool) -> None:
    def rank(file: str) -> None:
        import torch

        kernel = _kernels(file).meet_and_signal
        with mori_shmem.init(timeout_s=20) as comm:
            window = comm.alloc(4096)
            count = torch.zeros(1, dtype=torch.int64, device=comm.device)
            out = torch.zeros(2, dtype=torch.int64, device=comm.device)
            record = comm.fault_record
            table = torch.tensor(window.addresses, dtype=torch.int64, device=comm.device)
            for warps in (1, 4):
                for _ in range(20):
                    wanted = comm.read(window.at(512)) + 3
                    comm.barrier()
                    kernel[(1,)](table, count, record, comm.rank, 2, out, 10**10, wanted, num_warps=warps)
                    comm.barrier()
                    assert out.tolist() == [1, wanted]
            kernel[(1,)](table, count, record, comm.rank, 2, out, 3 * 10**8, 10**6, num_warps=4)
            with pytest.raises(PeerTimeout) as late:
                comm.barrier()
            assert (late.value.seen, late.value.wanted) == (123, 10**6)
            assert "flag 6/64 from rank" in str(late.value)
            time.sleep(1)
            comm.self_test()

    run(rank, 2, KERNELS, spread=spread)


def _kernels(file: str) -> Any:
    """The module of the test's Triton kernels, in a rank."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("cuda_kernels", file)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_both
def test_cuda_helpers_meet_signal_and_give_up(spread: bool, tmp_path: Any) -> None:
    from mori_shmem.jit import Source, Variant, build, cuda_headers
    from mori_shmem.jit.cache import Cache
    from mori_shmem.jit.compilers import compiler_named

    file = tmp_path / "k.cu"
    file.write_text(_KERNEL)
    variant = Variant("mori-shmem", Source.read(file, [cuda_headers()]), (), "sm_90a")
    cubin = build(variant, compiler=compiler_named("nvrtc"), cache=Cache(None))
    run(_run_cuda_helpers, 2, cubin, spread=spread)


_KERNEL = """
#include "words.cuh"
extern "C" __global__ void kernel(const uint64_t* table, uint64_t* count, Fault* fault, uint64_t timeout_ns,
                                  uint64_t* out, uint64_t wanted, uint32_t rank) {
  const Window window = {table, 0, 0, rank, 2};
  const Limits limits = {fault, timeout_ns, rank};
  bool met = all_ranks_meet(window, 0, count, limits, 5);
  if (threadIdx.x == 0) {
    add_to_word<SYSTEM>((uint64_t*)peer_pointer(window, 1 - rank) + 64, 3);
    uint64_t* mine = (uint64_t*)peer_pointer(window, rank) + 64;
    out[0] = met && wait_word<SYSTEM>(mine, wanted, limits, 1 - rank, 6, 64);
    out[1] = load_word<DEVICE_SCOPE>(mine);
  }
  all_ranks_meet(window, 0, count, limits, 5);
}
"""


def _run_cuda_helpers(cubin: bytes) -> None:
    from ctypes import c_uint32, c_uint64

    import torch
    from mori_shmem.jit import driver

    with mori_shmem.init(timeout_s=20) as comm:
        window = comm.alloc(4096)
        count, out = (torch.zeros(2, dtype=torch.int64, device=comm.device) for _ in range(2))
        function = driver.Module(cubin).function("kernel")
        arguments = [
            c_uint64(v)
            for v in (
                window.handle.table,
                count.data_ptr(),
                comm.fault_record.data_ptr(),
                10**10,
                out.data_ptr(),
                0,
            )
        ]
        launch = driver.PreparedLaunch(function, 1, 64, [*arguments, c_uint32(comm.rank)])
        stream = torch.cuda.current_stream().cuda_stream
        for i in range(1, 41):
            arguments[5].value = 3 * i
            launch.launch(stream)
            comm.barrier()
            assert out.tolist() == [1, 3 * i]
        arguments[3].value, arguments[5].value = 3 * 10**8, 10**6
        launch.launch(stream)
        with pytest.raises(PeerTimeout) as late:
            comm.barrier()
        assert (late.value.seen, late.value.wanted) == (123, 10**6)
        assert "flag 6/64 from rank" in str(late.value)
        time.sleep(1)
        comm.self_test()


# ---- what stands on it ----


@on_both
def test_all_reduce_by_loads_and_stores_is_exact_and_captured(spread: bool) -> None:
    def rank() -> None:
        import torch
        from mori_shmem.collectives import all_reduce_lsa, reduced_bytes

        def partial(of: int, round_: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(10 * round_ + of)
            return torch.randn(10_007, generator=generator).bfloat16()

        with mori_shmem.init(timeout_s=20) as comm:
            reduced_at = 20_480
            window = comm.alloc(reduced_at + reduced_bytes(10_007, comm.world_size))
            mine = window.tensor(10_007, torch.bfloat16)
            out = torch.empty(10_007, dtype=torch.bfloat16, device=comm.device)

            def call() -> None:
                all_reduce_lsa(window, out, partials_offset_bytes=0, reduced_offset_bytes=reduced_at)

            mine.copy_(partial(comm.rank, 0))
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            for round_ in range(1, 20):
                comm.barrier()  # nobody reads my partials any more
                mine.copy_(partial(comm.rank, round_))
                if round_ % 3:
                    graph.replay()
                else:
                    call()
                total = partial(0, round_).float()
                for of in range(1, comm.world_size):
                    total += partial(of, round_).float()
                assert torch.equal(out.cpu(), total.bfloat16()), round_

    run(rank, 2, spread=spread)


@two_gpus
def test_the_bench_validates_every_row_and_a_broken_one_not(capfd: pytest.CaptureFixture[str]) -> None:
    import mori_bench
    from mori_shmem.bench.__main__ import CUDA_PARTS, main

    few = ["--backend", "cuda", "--world-size", "2", "--reps", "1", "--warmup", "0", "--max-bytes", "65536"]
    assert main(few) == 0
    rows = mori_bench.results_in(capfd.readouterr().out.splitlines())
    assert all(row["validated"] and mori_bench.problems(row) == [] for row in rows)
    ops = {"latency": "round_trip"}
    assert {row["op"] for row in rows} == {ops.get(part, part) for part in CUDA_PARTS}
    assert {row["mode"] for row in rows if row["op"] == "put"} == {
        "shmem",
        "signalled",
        "eager",
        "sm",
        "nccl",
    }
    assert main([*few, "--part", "put", "--break", "swap_columns"]) == 1
    broken = mori_bench.results_in(capfd.readouterr().out.splitlines())
    assert broken and not any(row["validated"] for row in broken)  # noqa: PT018
