"""Can it be done? Answered without making an op, and by the op itself when it is made."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mori_shmem.errors import ArgumentError, MoriError, UnsupportedShape

from mori_gemm_ar.layout import MAX_ROWS
from mori_gemm_ar.options import Options, resolve
from mori_gemm_ar.settings import KERNELS, TABLE
from mori_gemm_ar.targets import target_for, target_name

MAX_WINDOW_BYTES = 1 << 46  # what mori-shmem maps of one rank


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
        window_bytes(backend, n, m_max, world_size, options)
    except MoriError as refusal:
        return Support(str(refusal))
    return Support()


def window_bytes(backend: str, n: int, m_max: int, world_size: int, options: Mapping[str, Any]) -> int:
    """What such an op allocates on each rank. `options` as for the constructor."""
    for name, value in (("n", n), ("m_max", m_max), ("world_size", world_size)):
        if type(value) is not int or value < 1:
            raise UnsupportedShape(f"{name}={value!r}: a whole number of at least 1")
    check_tuned(options.get("tuned"))
    known = {name for name in inspect.signature(resolve).parameters if not name.startswith("default_")}
    name_of_target = target_name(backend, TABLE.read({KERNELS: options.get("kernels")})[KERNELS])
    given = {n: value for n, value in options.items() if n not in ("self_test", "tuned", "kernels")}
    if unknown := given.keys() - known:
        raise ArgumentError(
            f"no such option: {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}"
        )
    chosen = resolve(**given, **defaults_of(name_of_target))
    check_options(name_of_target, chosen, options)
    nbytes: int = target_for(name_of_target).layout_for(m_max, n, world_size, chosen).nbytes
    if nbytes > MAX_WINDOW_BYTES:
        raise UnsupportedShape(
            f"n={n}, m_max={m_max} on {world_size} ranks need a window of {nbytes} bytes, at most "
            f"{MAX_WINDOW_BYTES} can be had: use a smaller m_max"
        )
    return nbytes


def defaults_of(backend: str) -> dict[str, Any]:
    """What `resolve` takes where nothing is chosen, as this target was tuned."""
    target = target_for(backend)
    return {"default_chunks": target.DEFAULT_CHUNKS, "default_gather_scale": target.DEFAULT_GATHER_SCALE}


def check_options(backend: str, chosen: Options, given: Mapping[str, Any]) -> None:
    """Raise ArgumentError for an option that this target cannot honour or would ignore, with its reason."""
    target = target_for(backend)
    idle: Mapping[str, str] = target.IDLE_OPTIONS
    reasons = [
        f"{name}={given[name]!r} {idle[name]}" for name in idle if given.get(name) not in (None, False)
    ]
    reasons += target.refuses(chosen, given)
    if reasons:
        raise ArgumentError(f"backend={backend!r}: " + "; ".join(reasons))


def check_tuned(tuned: object) -> None:
    """Raise ArgumentError for a `tuned` that says neither yes nor no."""
    if tuned is not None and type(tuned) is not bool:
        raise ArgumentError(
            f"tuned={tuned!r}: allowed are None, True and False; False leaves the tuned rules out"
        )


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
