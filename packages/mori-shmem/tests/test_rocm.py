"""The rocm target on the software node: what host and kernels do, at several numbers of ranks and schedules.

Strict mode is on in every run: a missing fence, wait or cache bit fails it, whatever the results are.
"""

from __future__ import annotations

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
    "test_SH_2_two_communicators_side_by_side",
    "test_SH_4_queues_that_do_not_exist_are_named",
    "test_GA_6_dropped_and_reordered_copies_fail_the_self_test",
    "test_SH_6_waits_end_with_the_facts",
    "kernels_that_are_late",
    "test_SH_3_opening_and_closing_gives_everything_back",
]
RANDOM = {"MORI_SIM_SCHEDULE": "random", "MORI_SIM_SEED": "11", "MORI_SIM_XCD_SEED": "5"}
LAGGARD = {"MORI_SIM_SCHEDULE": "delay-rank", "MORI_SIM_DELAY_RANK": "1", "MORI_SIM_COPY_DELAY_US": "300"}
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
        (8, {}, "rocr", ["puts_fenced", "lanes", "push", "meet"]),
    ],
    ids=["2-random", "4-laggard", "8-round-robin"],
)
def test_kernels(
    ranks: int, schedule: dict[str, str], way: str, names: list[str], cache: dict[str, str]
) -> None:
    variables = STRICT | schedule | SMALL_RING | cache | {"MORI_SHMEM_SDMA": way}
    outcome = simulate("on_device.py", ranks, *names, devices=ranks, **variables)
    assert outcome.ok == names, outcome.output
    assert outcome.code == 0, outcome.output


@pytest.mark.parametrize(("ranks", "schedule"), [(2, RANDOM), (4, LAGGARD)], ids=["2-random", "4-laggard"])
def test_host(ranks: int, schedule: dict[str, str], cache: dict[str, str]) -> None:
    variables = STRICT | schedule | cache | {"MORI_SHMEM_RING_BYTES": "256"}
    outcome = simulate("on_host.py", ranks, devices=ranks, **variables)
    assert outcome.ok == ON_HOST, outcome.output
    assert outcome.code == 0, outcome.output
