"""The cuda target in graphs and on streams.

Run with `tools/gpu_run pytest -m gpu packages/mori-shmem`. Each test says which fault it is about; the
functions that run in the ranks hold the assertions. What a queue promises on every target stands in
test_queue_contract.py.
"""

from __future__ import annotations

import os

import mori_shmem
import pytest
from gpu_ranks import kernels_of, on_both, one_gpu, run, two_gpus
from mori_shmem.errors import (
    ArgumentError,
    PeerTimeout,
)

KERNELS = os.path.join(os.path.dirname(__file__), "cuda_kernels.py")
pytestmark = pytest.mark.usefixtures("cuda_environment")


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

        produce = kernels_of(file).produce
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
