"""The rocm target on the software node: what host and kernels do, at several numbers of ranks and schedules.

Strict mode is on in every run: a missing fence, wait or cache bit fails it, whatever the results are.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import STRICT, needs_node, simulate

pytestmark = needs_node

ON_DEVICE = [
    *("puts_fenced", "puts_through", "lanes", "batch", "loopback", "push", "pull", "locked", "meet"),
    "whole",
]
ON_HOST = [
    "windows",
    "test_SH_5_puts_of_all_sizes_and_rows",
    "test_SH_5_several_threads_share_a_queue",
    "test_SH_5_quiet_means_that_the_bytes_are_there",
    "programs",
    "streams",
    "a_signal_before_close_arrives",
    "test_SH_2_two_communicators_side_by_side",
    "test_SH_4_queues_that_do_not_exist_are_named",
    "test_GA_6_dropped_and_reordered_copies_fail_the_self_test",
    "test_SH_6_waits_end_with_the_facts",
    "kernels_that_are_late",
    "test_SH_3_opening_and_closing_gives_everything_back",
]
ROUND_ROBIN = ("--schedule", "rr")
RANDOM = ("--schedule", "random", "--seed", "11")
LAGGARD = ("--schedule", "delay-rank", "--delay-rank", "1")
SLOW_COPIES = {"MORI_SIM_COPY_DELAY_US": "300", "MORI_SIM_XCD_SEED": "5"}
# 512 bytes hold 16 packets: the rings wrap all the time, and the puts of a kernel wait for room.
SMALL_RING = {"MORI_SHMEM_RING_BYTES": "512"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Ranks and runs compile a kernel once."""
    folder: Path = tmp_path_factory.mktemp("flydsl")
    return {"FLYDSL_RUNTIME_CACHE_DIR": str(folder)}


@pytest.mark.parametrize(
    ("ranks", "schedule", "way", "names"),
    [
        (2, RANDOM, "rocr", ON_DEVICE),
        (4, LAGGARD, "hsakmt", ["puts_fenced", "puts_through", "lanes", "batch", "push", "meet"]),
        (8, ROUND_ROBIN, "rocr", ["puts_fenced", "lanes", "push", "meet"]),
    ],
    ids=["2-random", "4-laggard", "8-round-robin"],
)
def test_kernels(
    ranks: int, schedule: tuple[str, ...], way: str, names: list[str], cache: dict[str, str]
) -> None:
    variables = SLOW_COPIES | SMALL_RING | cache | {"MORI_SHMEM_SDMA": way}
    options = (*STRICT, *schedule)
    outcome = simulate("on_device.py", ranks, *names, devices=ranks, options=options, **variables)
    assert outcome.ok == names, outcome.output
    assert outcome.code == 0, outcome.output


def test_the_bench_runs_and_claims_no_hardware() -> None:
    arguments = ("--backend", "rocm", "--world-size", 2, "--reps", 1, "--warmup", 1, "--max-bytes", 4096)
    outcome = simulate("-m", "mori_shmem.bench", *arguments, devices=2, options=STRICT)
    assert outcome.code == 0, outcome.output
    rows = [json.loads(line[12:]) for line in outcome.output.splitlines() if line.startswith("RESULT_JSON ")]
    assert {row["op"] for row in rows} == {"put", "put_signal", "signal_round_trip", "barrier"}
    assert all(row["validated"] and row["backend"] == "rocm" for row in rows)
    assert {row["device"] for row in rows} == {"software node (times are the simulator's)"}


@pytest.mark.parametrize(("ranks", "schedule"), [(2, RANDOM), (4, LAGGARD)], ids=["2-random", "4-laggard"])
def test_host(ranks: int, schedule: tuple[str, ...], cache: dict[str, str]) -> None:
    variables = SLOW_COPIES | cache | {"MORI_SHMEM_RING_BYTES": "256"}
    outcome = simulate("on_host.py", ranks, devices=ranks, options=(*STRICT, *schedule), **variables)
    assert outcome.ok == ON_HOST, outcome.output
    assert outcome.code == 0, outcome.output


def test_SH_7_waits_that_find_a_rank_dead_end_this_ranks_kernels(cache: dict[str, str]) -> None:
    outcome = simulate("dead_peer.py", devices=2, timeout_s=280, **cache)
    assert outcome.ok == ["barrier", "wait", "wait_for_anybody", "alloc", "all_gather"], outcome.output
