"""Errors travel between processes, so each must come out of a pickle as it went in."""

import inspect
import pickle

import pytest
from mori_shmem import errors

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.MoriError)]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_every_error_survives_a_pickle(cls: type[errors.MoriError]) -> None:
    error = cls("what, how much, what to do")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == "what, how much, what to do"


def test_attributes_survive_a_pickle() -> None:
    late = pickle.loads(pickle.dumps(errors.PeerTimeout("late", rank=0, peers=[2], seen=3, wanted=4)))
    assert (late.rank, late.peers, late.seen, late.wanted) == (0, (2,), 3, 4)


def test_errors_can_be_caught_as_what_python_calls_them() -> None:
    assert issubclass(errors.PeerTimeout, TimeoutError)
    assert issubclass(errors.LayoutError, ValueError)
    assert issubclass(errors.CoreMissing, ImportError)
