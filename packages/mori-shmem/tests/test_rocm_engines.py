"""Which engine serves which peer, and what a device queue's words are: numbers, no node needed."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
from mori_shmem.device import queue_words
from mori_shmem.targets.rocm.engines import MI355X_ENGINES, candidates, differs_from_table


@pytest.mark.parametrize("for_kernels", [False, True])
def test_on_a_full_board_each_peer_has_the_two_engines_of_its_link(for_kernels: bool) -> None:
    for rank, row in enumerate(MI355X_ENGINES):
        firsts = []
        for peer, engine in enumerate(row):
            if peer == rank:
                continue
            found = candidates(3 << engine, rank, peer, 8, for_kernels=for_kernels)
            assert sorted(found) == [engine, engine + 1]
            firsts.append(found[0])
        assert len(set(firsts)) == 7  # no two peers on one engine


def test_host_and_kernels_use_different_engines() -> None:
    for mask in (3 << 14, 0xFFFC, 0):
        host = candidates(mask, 0, 1, 8, for_kernels=False)
        kernels = candidates(mask, 0, 1, 8, for_kernels=True)
        assert host[0] != kernels[0]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_peers_share_a_pool_evenly(world_size: int) -> None:
    firsts = [
        candidates(0xFFFC, 1, peer, world_size, for_kernels=False)[0]
        for peer in range(world_size)
        if peer != 1
    ]
    assert len(set(firsts)) == world_size - 1
    assert all(2 <= engine < 16 for engine in firsts)


def test_a_queue_to_oneself_uses_the_ordinary_engines() -> None:
    assert candidates(0, 3, 3, 8, for_kernels=False) == [0, 1]


def test_the_table_is_held_against_the_driver_where_it_applies() -> None:
    assert differs_from_table(3 << 14, 0, 1, 8) == ""
    assert "engines 0x30 for copies from GPU 0 to GPU 1" in differs_from_table(0x30, 0, 1, 8)
    for mask, place, peer, gpus in ((0xFFFC, 0, 1, 8), (0, 0, 1, 8), (0x30, 0, 0, 8), (0x30, 0, 1, 4)):
        assert differs_from_table(mask, place, peer, gpus) == ""


def test_each_pair_of_engines_serves_one_link() -> None:
    for rank, row in enumerate(MI355X_ENGINES):
        assert sorted(row) == [-1, 2, 4, 6, 8, 10, 12, 14]
        assert row[rank] == -1


def test_what_a_probe_has_used_of_the_ring_counts_as_used() -> None:
    from mori_shmem.targets.rocm.fabric import words_of

    queue = SimpleNamespace(
        submitted_bytes=128, ring=1 << 40, read_pointer=8, write_pointer=16, doorbell=24, ring_bytes=512
    )
    words = struct.unpack("<16Q", words_of(queue, 5, 1234, 2.5))  # type: ignore[arg-type]
    at = {name: words[getattr(queue_words, name) // 8] for name in ("RESERVED", "COMMITTED", "READ", "DONE")}
    assert at == {"RESERVED": 128, "COMMITTED": 128, "READ": 128, "DONE": 4}
    assert words[queue_words.RING // 8] == 1 << 40
    assert words[queue_words.TIMEOUT // 8] == 250_000_000
    assert words[queue_words.PEER // 8] == 5
    assert words[queue_words.LOCK // 8] == 0
