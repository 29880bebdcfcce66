"""The group's store behind a deadline, with stores that do not answer."""

import threading

import pytest
from mori_ep.internode.store import PatientStore
from mori_shmem.deadline import Deadline
from mori_shmem.errors import PeerTimeout


class Silent:
    """As behind a link that was cut."""

    def check(self, *asked: object) -> bool:
        threading.Event().wait()
        return True

    set = get = check


class Refusing:
    def check(self, keys: list[str]) -> bool:
        raise ConnectionError("reset")


class Empty:
    def check(self, keys: list[str]) -> bool:
        return False


def test_a_store_that_does_not_answer_ends_at_the_deadline() -> None:
    store = PatientStore(Silent(), 1, 4)
    with pytest.raises(PeerTimeout, match="rank 1 of 4: the group's store did not answer about gather1"):
        store.fetch(["gather1/0"], "gather1", Deadline(0.1))
    with pytest.raises(PeerTimeout, match="did not answer about key"):
        store.set("key", b"", Deadline(0.1))


def test_its_own_errors_come_through() -> None:
    with pytest.raises(ConnectionError, match="reset"):
        PatientStore(Refusing(), 0, 2).fetch(["a/0"], "a", Deadline(1.0))


def test_who_did_not_come_is_named() -> None:
    with pytest.raises(PeerTimeout, match=r"\['0', '3'\] of 2 did not come to a"):
        PatientStore(Empty(), 0, 4).fetch(["a/0", "a/3"], "a", Deadline(0.05))
