"""The all-reduce by loads and stores, and the bf16 sum that it is made of, against plain torch."""

from typing import Any

import mori_shmem
import pytest
from mori_shmem.errors import ArgumentError, LayoutError


def _reference(parts: list[Any]) -> Any:
    """fp32 additions in rank order, rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.bfloat16()


@pytest.mark.parametrize("num_sources", [1, 2, 3, 8])
@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 65537])
def test_sum_bf16_adds_in_order_and_rounds_once(num_sources: int, numel: int) -> None:
    import torch
    from mori_shmem.device.host import sum_bf16

    torch.manual_seed(numel)
    sources = [torch.randn(numel).mul_(10.0**i).bfloat16() for i in range(num_sources)]
    out = torch.empty(numel, dtype=torch.bfloat16)
    expected = _reference(sources)
    sum_bf16(out, sources)
    assert torch.equal(out, expected)
    sum_bf16(sources[0], sources)  # into one of its sources
    assert torch.equal(sources[0], expected)


def test_sum_bf16_keeps_what_is_not_finite_in_its_place() -> None:
    import torch
    from mori_shmem.device.host import sum_bf16

    a = torch.tensor([float("nan"), float("inf"), float("inf"), 3e38, 1.0, 2.0**-133], dtype=torch.bfloat16)
    b = torch.tensor([1.0, 1.0, float("-inf"), 3e38, -1.0, 2.0**-133], dtype=torch.bfloat16)
    out = torch.empty_like(a)
    sum_bf16(out, [a, b])
    assert out.isnan().tolist() == [True, False, True, False, False, False]
    assert out[[1, 3, 4, 5]].tolist() == [float("inf"), float("inf"), 0.0, 2.0**-132]


def test_sum_bf16_refuses_what_it_cannot_add() -> None:
    import torch
    from mori_shmem.device.host import sum_bf16

    good = torch.zeros(8, dtype=torch.bfloat16)
    for out, sources, match in (
        (good, [good, torch.zeros(8)], r"sources\[1\] is torch.float32"),
        (good, [torch.zeros(7, dtype=torch.bfloat16)], r"sources\[0\] .*of 8 elements"),
        (torch.zeros(16, dtype=torch.bfloat16)[::2], [good], r"out is .*strides \(2,\)"),
        (good, [], r"sources is empty"),
    ):
        with pytest.raises(ArgumentError, match=match):
            sum_bf16(out, sources)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_all_reduce_lsa_is_exact_for_any_size_call_after_call(world_size: int) -> None:
    def rank() -> list[bytes]:
        import torch
        from mori_shmem.collectives import all_reduce_lsa, reduced_bytes

        largest = 100_003
        reduced = (2 * largest + 255) // 256 * 256
        with mori_shmem.init() as comm:
            window = comm.alloc(reduced + reduced_bytes(largest, comm.world_size))
            digests = []
            for call, numel in enumerate((largest, 1, 5, comm.world_size * 64, 0, 4097)):
                torch.manual_seed(call)
                everybodys = [torch.randn(numel).bfloat16() for _ in range(comm.world_size)]
                window.tensor(numel, torch.bfloat16).copy_(everybodys[comm.rank])
                out = torch.full((numel,), -1.0).bfloat16()
                all_reduce_lsa(window, out, partials_offset_bytes=0, reduced_offset_bytes=reduced)
                window.tensor(largest, torch.bfloat16).fill_(
                    float("nan")
                )  # at once: nobody reads them any more
                assert torch.equal(out, _reference(everybodys))
                digests.append(bytes(out.view(torch.uint8).tolist()))
            comm.barrier()
            return digests

    first, *others = mori_shmem.run_ranks(rank, world_size)
    assert all(other == first for other in others)


def test_all_reduce_lsa_refuses_regions_that_overlap() -> None:
    import torch
    from mori_shmem.collectives import all_reduce_lsa, slice_bounds

    assert slice_bounds(10, 4) == [0, 3, 6, 8, 10]
    with mori_shmem.init(rank=0, world_size=1, name="collectives") as comm:
        window = comm.alloc(4096)
        out = torch.empty(1024, dtype=torch.bfloat16)
        with pytest.raises(LayoutError, match=r"overlap"):
            all_reduce_lsa(window, out, partials_offset_bytes=0, reduced_offset_bytes=1024)
        with pytest.raises(LayoutError, match=r"do not fit"):
            all_reduce_lsa(window, out, partials_offset_bytes=0, reduced_offset_bytes=4000)
        with pytest.raises(ArgumentError, match=r"out is torch.float32"):
            all_reduce_lsa(window, out.float(), partials_offset_bytes=0, reduced_offset_bytes=2048)
