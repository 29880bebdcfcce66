"""The cuda target on GPUs: transport, communicators, ranks that die or do not come.

Run with `tools/gpu_run pytest -m gpu packages/mori-shmem`. Each test says which fault it is about; the
functions that run in the ranks hold the assertions. What a queue promises on every target stands in
test_queue_contract.py.
"""

from __future__ import annotations

import os
import time
from typing import Any

import mori_shmem
import pytest
from gpu_ranks import on_both, one_gpu, run, two_gpus
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    PeerDied,
    PeerTimeout,
    QueueLimitError,
    TransportInert,
)
from mori_shmem.testing import die, faults, open_fds, run_ranks_to_the_end

pytestmark = pytest.mark.usefixtures("cuda_environment")


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
