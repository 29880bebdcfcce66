"""The record by which kernels' waits and the host tell each other that a call has failed. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_shmem.core import CoreError, core_error
from mori_shmem.device import queue_words as words
from mori_shmem.errors import PeerDied, PeerTimeout
from mori_shmem.targets.fault_record import CallFaults, FaultRecord
from mori_shmem.targets.gpu_fabric import GpuFabric


def record() -> FaultRecord:
    return FaultRecord(torch.zeros(8, dtype=torch.int32))


def publish(kept: FaultRecord) -> None:
    """As a kernel of rank 0 whose wait for rank 1 was late."""
    kept.memory[:] = torch.tensor([words.CODE_PUBLISHED, 0, 1, 7, 3, 4, 5, 6], dtype=torch.int32)


def test_a_record_is_taken_once() -> None:
    kept = record()
    assert kept.take() is None
    publish(kept)
    fault = kept.take()
    assert fault is not None
    assert (fault.info["peer"], fault.info["purpose"], fault.info["seen"], fault.info["wanted"]) == (
        1, "flag 7/3", 4, 5,
    )  # fmt: skip
    assert kept.take() is None
    assert int(kept.memory[0]) == 0


def test_SH_7_abandoned_kernels_see_a_code_for_good_and_it_is_no_fault() -> None:
    kept = record()
    kept.abandon([1])
    assert int(kept.memory[0]) == words.CODE_ABANDONED
    assert kept.take() is None
    assert int(kept.memory[0]) == words.CODE_ABANDONED


def test_SH_7_what_a_kernel_has_written_is_told_before_it_counts_as_abandoned() -> None:
    kept = record()
    publish(kept)
    kept.abandon([1])
    assert kept.take() is not None
    assert int(kept.memory[0]) == words.CODE_ABANDONED  # waits to come end, too


class Alone(GpuFabric):
    """Rank 0 of a fabric without a GPU, whose peers are in these states."""

    def __init__(self, states: list[str]) -> None:
        control: Any = SimpleNamespace(
            rank=0, world_size=len(states), queues_per_peer=1, peer_states=lambda: states
        )
        super().__init__(control, record(), 1.0)

    def signal(self, where: int, value: int, op: str = "set") -> None: ...
    def signals_are_out(self) -> bool:
        return True

    def look(self, where: int, deadline: object) -> int | None:
        return 0

    def await_callers_work(self, timeout_s: float) -> None: ...
    def is_capturing(self) -> bool:
        return False


def test_SH_7_kernels_are_given_up_when_a_rank_has_died_and_every_check_says_so() -> None:
    states = ["alive", "alive", "left"]
    fabric = Alone(states)
    assert fabric.give_up_kernels() == []
    fabric.check()
    states[1] = "dead"
    assert fabric.give_up_kernels() == [1]
    for _ in range(2):
        with pytest.raises(CoreError) as told:
            fabric.check()
        assert (told.value.kind, told.value.info["ranks"]) == ("peer_died", [1])
    fabric.await_idle(lambda: True, None, what="quiet")  # what needs no kernel goes on


@pytest.mark.parametrize("ends_kernels", [True, False])
@pytest.mark.parametrize("wait", ["wait", "barrier", "await_idle"])
def test_SH_7_a_wait_of_the_host_that_finds_a_rank_dead_ends_the_kernels(
    wait: str, ends_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the target says so; what ends with a rank that has left does not."""
    monkeypatch.setattr(Alone, "ends_kernels", ends_kernels)
    states = ["alive", "left", "alive"]
    fabric = Alone(states)

    def barrier(timeout_s: float) -> None:
        gone = {"dead": "peer_died", "left": "peer_left"}
        kind, rank = next((gone[state], rank) for rank, state in enumerate(states) if state in gone)
        raise core_error(kind, ranks=[rank], what="barrier")  # type: ignore[arg-type]

    fabric.control.barrier = barrier  # type: ignore[method-assign]
    waits: dict[str, Callable[[], object]] = {
        "wait": lambda: fabric.wait(0, 1, timeout_s=0.5),
        "barrier": fabric.barrier,
        "await_idle": lambda: fabric.await_idle(lambda: False, 0.05, what="quiet"),
    }
    with pytest.raises(CoreError):
        waits[wait]()
    fabric.check()  # nobody has died
    states[2], states[1] = "dead", "alive"
    fabric._next_death_look = 0.0
    with pytest.raises(CoreError) as told:
        waits[wait]()
    assert (told.value.kind, told.value.info["ranks"]) == ("peer_died", [2])
    assert fabric.record.gone == ([2] if ends_kernels else [])
    assert int(fabric.record.memory[0]) == (words.CODE_ABANDONED if ends_kernels else 0)


@pytest.mark.parametrize("ends_kernels", [True, False])
def test_SH_7_so_does_a_collective_that_does_also_where_only_its_socket_is_closed_yet(
    ends_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Alone, "ends_kernels", ends_kernels)
    states = ["alive", "left", "alive"]
    fabric = Alone(states)
    fabric.heard_of_death([1])
    fabric.check()  # it has left, and nobody has died
    asked = iter(range(100))

    def peer_states() -> list[str]:
        return ["alive", "left", "dead" if next(asked) > 10 else "alive"]

    fabric.control.peer_states = peer_states  # type: ignore[method-assign]
    fabric.heard_of_death([2])
    assert fabric.record.gone == ([2] if ends_kernels else [])


# ---- an op's own records ----


def faults_of(kept: FaultRecord, states: list[str], others: list[str]) -> CallFaults:
    """Of an op whose records begin at 0x700; a check of the communicator is noted in `others`."""
    core = SimpleNamespace(record=kept, peer_states=lambda: states)
    comm: Any = SimpleNamespace(core=core, timeout_s=2.0, check=lambda: others.append("checked"))
    return CallFaults(
        comm,
        0x700,
        lambda found, limit_s: PeerTimeout(
            f"flag {found['index']} late after {limit_s:g} s", rank=found["rank"], peers=[found["peer"]]
        ),
    )


def publish_ours(kept: FaultRecord, code: int = words.CODE_PUBLISHED) -> None:
    kept.memory[:] = torch.tensor([code, 0, 1, 0x705, 3, 4, 5, 6], dtype=torch.int32)


def test_what_an_op_left_may_be_dropped_before_anybody_has_seen_it_but_nothing_of_others() -> None:
    kept, others = record(), list[str]()
    faults = faults_of(kept, ["alive", "alive"], others)
    publish_ours(kept)
    faults.drop()
    assert not faults.found()
    publish_ours(kept)
    with pytest.raises(PeerTimeout):
        faults.check()
    faults.drop()
    assert not faults.found()
    publish(kept)  # of another op, or of mori-shmem
    faults.drop()
    assert faults.found()


def test_what_an_op_left_is_raised_in_every_call_until_it_is_forgiven() -> None:
    kept, others = record(), list[str]()
    faults = faults_of(kept, ["alive", "alive"], others)
    faults.check()
    publish_ours(kept, code=words.CODE_PUBLISHED + 100)  # a kernel is writing it
    faults.check()
    publish_ours(kept)
    for _ in range(2):
        assert faults.found()
        with pytest.raises(PeerTimeout, match="flag 3 late after 2 s"):
            faults.check()
    assert int(kept.memory[0]) == 0, "kernels of later calls may write"
    faults.forgive()
    assert not faults.found()
    faults.check()
    assert others == []


def test_SH_7_a_rank_that_is_late_because_it_died_is_said_to_have() -> None:
    kept = record()
    faults = faults_of(kept, ["alive", "dead"], [])
    publish_ours(kept)
    with pytest.raises(PeerDied, match=r"rank 1 has died\. flag 3 late") as told:
        faults.check()
    assert told.value.peers == (1,)


def test_a_record_of_another_op_is_left_to_the_communicator() -> None:
    kept, others = record(), list[str]()
    publish(kept)
    faults_of(kept, ["alive", "alive"], others).check()
    assert others == ["checked"]
    assert int(kept.memory[0]) == words.CODE_PUBLISHED
