"""The rocm target where something is missing, used up, fused off or dead: what is said, and how soon."""

from __future__ import annotations

import re

from simulated import needs_node, simulate

pytestmark = needs_node


def test_SH_4_no_queue_left_names_ways_engines_and_answers() -> None:
    outcome = simulate("breaking.py", "runs_out_of_queues", devices=1, MORI_SIM_QUEUES_PER_ENGINE="2")
    assert outcome.code == 0, outcome.output
    (said,) = re.findall("raised QueueLimitError: .*", outcome.output)
    for words in (
        "no SDMA queue to rank 0 (MORI_SHMEM_SDMA=auto)",
        "rocr, engine 0: hsa_amd_queue_create answered HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        "hsakmt, engine 1: hsaKmtCreateQueueExt answered status (1)",
        "another process holds the queues",
    ):
        assert words in said
    assert "again works" in outcome.output


def test_GA_6_engines_that_never_run_are_found_before_anything_is_sent() -> None:
    variables = {"MORI_SIM_MISSING_ENGINES": "0xffff", "MORI_TIMEOUT_S": "0.5"}
    outcome = simulate("breaking.py", "opens", devices=2, **variables)
    said = re.findall("raised TransportInert: .*", outcome.output)
    assert len(said) == 2, outcome.output
    assert "engine 0: its probe did not come back: the read pointer stands at 0 of 88 bytes" in said[0]


def test_an_engine_that_is_fused_off_is_passed_over_with_a_warning() -> None:
    variables = {"MORI_SIM_MISSING_ENGINES": "0x4", "MORI_TIMEOUT_S": "1"}
    outcome = simulate("breaking.py", "opens", devices=2, **variables)
    assert outcome.output.count("opened by rocr") == 2, outcome.output
    assert "rank 0: the queue to rank 1 runs on engine 3, because rocr, engine 2" in outcome.output


def test_GA_6_copy_engines_turned_off_by_the_environment_are_refused() -> None:
    outcome = simulate("breaking.py", "opens", devices=2, HSA_ENABLE_SDMA="0")
    assert outcome.output.count("raised TransportInert: HSA_ENABLE_SDMA=0 turns the copy engines off") == 2


def test_two_ranks_on_one_gpu_are_refused_on_all() -> None:
    outcome = simulate("breaking.py", "one_device", devices=2)
    assert outcome.output.count("ranks [0, 2] share GPUs (0000:10:00.0)") == 3, outcome.output


def test_SH_7_a_dead_rank_ends_the_waits_of_the_others() -> None:
    outcome = simulate("breaking.py", "dead", devices=4)
    for how in ("signal", "barrier", "quiet"):
        said = re.findall(f"{how}: soon raised PeerDied: .*", outcome.output)
        assert len(said) == 3, outcome.output
        assert all("rank 1" in line.partition("PeerDied")[2] for line in said)
