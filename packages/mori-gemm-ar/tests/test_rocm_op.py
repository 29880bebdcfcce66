"""The op on the simulated node: every mode on 1 to 8 ranks, strict coherence, several schedules
(rocm_ranks.py).

A group of cases shares its ranks, and each of its functions is a test. Fixture GX makes the right result
exact: equal bits here are the host target's. Rings are as small as they can be, so that they are filled many
times.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mori_shmem.testing import allowing_for_load

PROGRAM = Path(__file__).parent / "rocm_ranks.py"
MISSING = [name for name in ("flydsl", "mori_sim") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}; pip install 'mori-sim[flydsl]'"),
    pytest.mark.timeout(600),
]

ROUND_ROBIN, RANDOM, ONE_LATE = ("rr",), ("random", "--seed", "3"), ("delay-rank", "--delay-rank", "1")
GROUPS = {  # ranks, schedule, functions of rocm_ranks.py
    (2, ROUND_ROBIN): (
        *("modes", "option_cases", "random_operands", "stages", "degenerate_rows"),
        *("strides_and_capacity", "second_call", "replayed_graphs"),
    ),
    (2, RANDOM): ("modes", "many_calls"),
    (2, ONE_LATE): ("modes", "queued_calls"),
    (4, ROUND_ROBIN): ("modes",),
    (4, RANDOM): ("option_cases",),
    (4, ONE_LATE): ("queued_calls",),
    (8, ROUND_ROBIN): ("modes",),
    (8, RANDOM): ("queued_calls",),
    (8, ONE_LATE): ("fused",),
    (1, ROUND_ROBIN): ("modes",),
    (3, RANDOM): ("fused",),
    (5, ROUND_ROBIN): ("fused",),
    (7, ONE_LATE): ("fused",),
}


NAME = "test_GA_1_every_rank_has_the_exact_bytes"


@dataclass
class Outcome:
    code: int
    output: str

    @property
    def by_rank(self) -> list[Any]:
        """What each rank found; None of one that died."""
        line = next((x for x in self.output.splitlines() if x.startswith("FOUND ")), None)
        assert line, self.output
        return json.loads(line.removeprefix("FOUND "))


def on_node(world_size: int, *names: str, options: tuple[str, ...] = (), **variables: str) -> Outcome:
    command = [
        *(sys.executable, "-m", "mori_sim", "run", "--devices", str(world_size), *options),
        *("--", sys.executable, str(PROGRAM), str(world_size), *names),
    ]
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Outcome(done.returncode, done.stdout)


def group(world_size: int, schedule: tuple[str, ...]) -> Outcome:
    options = ("--coherence", "strict", "--schedule", *schedule)
    names = GROUPS[world_size, schedule]
    return on_node(world_size, *names, options=options, MORI_SHMEM_RING_BYTES="4096", MORI_TIMEOUT_S="120")


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest) -> Iterator[dict[Any, Future[Outcome]]]:
    """The groups that tests of this session ask for, two at a time: ranks that wait for each other, and the
    one process that traces their kernels, leave cores idle."""
    ours = [item for item in request.session.items if isinstance(item, pytest.Function)]
    params = [item.callspec.params for item in ours if item.originalname == NAME]
    wanted = dict.fromkeys((given["world_size"], given["schedule"]) for given in params)
    with ThreadPoolExecutor(2) as pool:
        running = {where: pool.submit(group, *where) for where in wanted}
        yield running
        for future in running.values():
            future.cancel()


@pytest.mark.parametrize(
    ("world_size", "schedule", "name"),
    [(*where, name) for where, names in GROUPS.items() for name in names],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_GA_1_every_rank_has_the_exact_bytes(
    world_size: int, schedule: tuple[str, ...], name: str, groups: dict[Any, Future[Outcome]]
) -> None:
    outcome = groups[world_size, schedule].result()
    assert outcome.code == 0, outcome.output[-4000:]  # 3: a rule of strict mode was broken
    for rank, found in enumerate(outcome.by_rank):
        assert found[name], "no cases"
        assert {case: wrong for case, wrong in found[name].items() if wrong} == {}, f"rank {rank}"


LIMIT_S = round(allowing_for_load(2.0), 1)  # of the waits for a rank that does not come


@functools.cache
def failures() -> Outcome:
    return on_node(3, "different_m", "missing_rank", "refusals", LIMIT_S=str(LIMIT_S))


MODES = ("split-sdma", "fused-sdma", "split-lsa", "fused-lsa")


@pytest.mark.parametrize("mode", MODES)
def test_ranks_called_with_different_m_find_out(mode: str) -> None:
    for rank, found in enumerate(failures().by_rank):
        text = found["different_m"][mode]
        assert f"CollectiveMismatch: rank {rank} called with M={60 + rank}, rank" in text


@pytest.mark.parametrize("mode", MODES)
def test_SH_6_a_rank_that_does_not_come_is_named(mode: str) -> None:
    for found in failures().by_rank[:2]:
        text = found["missing_rank"][mode]
        late = re.match(r"PeerTimeout after ([\d.]+) s", text)
        assert late, text
        assert LIMIT_S <= float(late[1]) < LIMIT_S + allowing_for_load(1.0), text
        assert "from rank 2 should have been" in text
        assert "MORI_TIMEOUT_S" in text


def test_PK_2_what_this_target_cannot_do_is_refused_with_the_values() -> None:
    for found in failures().by_rank:
        told = found["refusals"]
        assert "UnsupportedShape: n=130: a multiple of 8" in told["n"]
        assert "UnsupportedShape: k=64: at least 128" in told["k"]
        assert "ArgumentError: sdma_queues=2" in told["queues"]
        assert "ArgumentError: kernels='triton' on backend 'rocm'" in told["triton"]
        assert told["afterwards"] == []


def test_supports_says_no_to_triton_kernels_here() -> None:
    from mori_gemm_ar import GemmAllReduce

    sizes = {"n": 256, "k": 256, "m_max": 64, "world_size": 2, "mode": "split-lsa"}
    assert GemmAllReduce.supports(**sizes, backend="rocm")
    answer = GemmAllReduce.supports(**sizes, backend="rocm", kernels="triton")
    assert "kernels='triton' on backend 'rocm'" in answer.reason


@functools.cache
def deaths(folder: Path) -> dict[str, Any]:
    """By mode. The waits of the survivors' kernels would take 30 s."""
    outcome = on_node(8, "die_in_the_middle", PAIRS=str(folder))
    found = [rank["die_in_the_middle"] for rank in outcome.by_rank if rank is not None]
    return {told["mode"]: told for told in found}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.mark.parametrize("mode", MODES)
def test_SH_7_a_rank_that_dies_is_named_and_holds_nobody_up(mode: str, folder: Path) -> None:
    told = deaths(folder)[mode]
    assert "PeerDied: rank 0 of 2, in call 2" in told["seen"]
    assert "rank 1 died" in told["seen"]
    assert told["late_s"] < allowing_for_load(2.0)
    assert told["close_s"] < allowing_for_load(3.0)


def test_GA_6_engines_that_do_nothing_are_found_out_when_the_op_is_made() -> None:
    outcome = on_node(2, "modes", MORI_SIM_MISSING_ENGINES="0xffff")
    assert outcome.by_rank == [None, None]
    assert "TransportInert" in outcome.output, outcome.output[-4000:]
    assert "its probe did not come back" in outcome.output
