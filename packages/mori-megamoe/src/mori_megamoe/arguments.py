"""What one argument that is no tensor is held to, whoever takes it. Local, and without torch."""

from __future__ import annotations

import numbers
import operator
from typing import Any

from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError


def check_flag(name: str, value: object) -> None:
    """True or False."""
    if type(value) is not bool:
        raise ArgumentError(f"{name}={described(value)}: True or False is needed")


def check_whole(name: str, value: object) -> None:
    """A whole number; its range is for others to say."""
    if type(value) is not int:
        raise ArgumentError(f"{name}={described(value)}: a whole number is needed")


def check_number(name: str, value: object) -> None:
    """A real number, of numpy also."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ArgumentError(f"{name}={described(value)}: a number is needed")


def check_word(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of some strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(f"{name}={described(value)} is not known; allowed: {', '.join(allowed)}")


def whole_numbers(name: str, given: Any, what: str) -> tuple[int, ...]:
    """A sequence of them; `what` says of what kind."""
    try:
        return tuple(operator.index(number) for number in given)
    except TypeError:
        raise ArgumentError(f"{name} is {described(given)}: {what} is needed") from None
