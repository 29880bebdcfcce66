"""Can it be done? Answered without making an op, and by the op itself when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mori_shmem.errors import MoriError, UnsupportedShape

from mori_gemm_ar.layout import MAX_ROWS
from mori_gemm_ar.options import resolve
from mori_gemm_ar.targets import target_for


@dataclass(frozen=True)
class Support:
    """True or false, with the reason against."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def supports(
    *, n: int, k: int, m_max: int, world_size: int, backend: str = "host", **options: Any
) -> Support:
    """Whether an op of these sizes and options can be made."""
    try:
        check_sizes(backend, n, k, m_max)
        if type(world_size) is not int or world_size < 1:
            raise UnsupportedShape(f"world_size={world_size!r}: a whole number of at least 1")
        resolve(**options)
    except MoriError as refusal:
        return Support(str(refusal))
    return Support()


def check_sizes(backend: str, n: int, k: int, m_max: int) -> None:
    """Raise UnsupportedShape if no op of these sizes can be made."""
    for name, value in (("n", n), ("k", k), ("m_max", m_max)):
        if type(value) is not int:
            raise UnsupportedShape(f"{name}={value!r}: a whole number is needed")
    if not 1 <= m_max <= MAX_ROWS:
        raise UnsupportedShape(f"m_max={m_max}: from 1 to {MAX_ROWS}")
    reason = target_for(backend).why_not(n, k)
    if reason:
        raise UnsupportedShape(reason)
