"""The rocm target's memory on the software node: large windows, and windows of what torch has allocated."""

from __future__ import annotations

import re
from pathlib import Path

import mori_shmem
import pytest
from mori_shmem import errors
from simulated import PROGRAMS, STRICT, needs_node, simulate


def _available_gib() -> float:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found.group(1)) / (1 << 20) if found else 0.0


def names_of(program: str) -> list[str]:
    """The checks that a program lists."""
    listed = re.search(r"^CHECKS = \((.*?)\)$", (PROGRAMS / program).read_text(), re.S | re.M)
    return re.findall(r"\w+", listed.group(1)) if listed else []


@needs_node
@pytest.mark.skipif(_available_gib() < 8, reason=f"8 GiB of memory, {_available_gib():.1f} are free")
def test_SH_1_sizes_and_offsets_beyond_32_bits() -> None:
    outcome = simulate("large.py", devices=2)
    assert outcome.ok == names_of("large.py"), outcome.output
    assert outcome.code == 0, outcome.output


@needs_node
@pytest.mark.parametrize("ranks", [2, 3])
def test_memory_that_torch_allocated_is_a_window(ranks: int) -> None:
    outcome = simulate("imported.py", ranks, devices=ranks, options=STRICT)
    assert outcome.ok == names_of("imported.py"), outcome.output
    assert outcome.code == 0, outcome.output


@needs_node
@pytest.mark.parametrize(("way", "code"), [("bare", 3), ("fenced", 0)])
def test_a_second_address_of_the_same_memory_is_no_way_around_a_fence(way: str, code: int) -> None:
    outcome = simulate("alias.py", way, devices=1, options=STRICT)
    assert outcome.ok == ["read"], outcome.output
    assert outcome.code == code, outcome.output
    assert ("bytes need not have left the L2" in outcome.output) == (way == "bare")


def test_other_backends_refuse_it_and_say_what_to_take() -> None:
    import torch

    def rank() -> str:
        with mori_shmem.init("host") as comm, pytest.raises(errors.ArgumentError) as refusal:
            comm.import_tensor(torch.zeros(8))
        return str(refusal.value)

    for text in mori_shmem.run_ranks(rank, 2):
        assert "import_tensor on backend 'host'" in text
        assert "comm.alloc(nbytes)" in text
