"""Every wrong argument of a public entry, from what is right for it.

A table names every parameter of an entry and what is right for it: `Tensor`, `Flag`, `Whole`, `Other`. From
that follows what is wrong: another type, dtype, shape, device, strides. `refused` makes all these calls and
says where an error was not ours, or did not help; `unnamed` says what the tables forgot.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mori_shmem
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, ClosedError

HIDDEN, TOPK, EXPERTS, TOKENS, MAX_TOKENS = 128, 3, 8, 8, 16
HELPS = re.compile(
    r"needed|needs|allowed|was made for|one of|at most|pass |the most|only|must be|takes|adds rows of"
)

# ---- what is right, and what is wrong then ----


@dataclass
class Tensor:
    """A tensor; which of its properties the entry prescribes, since others are free."""

    good: torch.Tensor
    optional: bool = False
    rows: bool = True
    columns: bool = True
    dtype: bool = True

    def wrong(self) -> Iterator[tuple[str, Any]]:
        x = self.good
        yield from {"text": "x", "a list": [1.0, 2.0], "a number": 3, "numpy": torch.ones(3).numpy()}.items()
        if not self.optional:
            yield "None", None
        yield "on meta", x.to("meta")
        yield "sparse", torch.zeros(x.shape).to_sparse()
        yield "one dimension less", x.flatten() if x.dim() > 1 else x[0]
        if x.dim() > 1:
            yield "strided", x.transpose(0, 1).contiguous().transpose(0, 1)
        if self.rows:
            yield "a row less", x[1:].clone()
        if self.columns and x.dim() > 1:
            yield "a column more", torch.cat([x, x[..., :1]], -1)
        if self.dtype:
            yield "complex", x.to(torch.complex64)
            yield "float64", x.double()


class Flag:
    """True or False."""

    def wrong(self) -> Iterator[tuple[str, Any]]:
        yield from ((repr(value), value) for value in (7, -1, "yes", 0.5, None))


@dataclass
class Whole:
    """A whole number, at least `low`."""

    low: int

    def wrong(self) -> Iterator[tuple[str, Any]]:
        yield from ((repr(value), value) for value in ("8", 2.5, None, [], self.low - 1))


@dataclass
class Other:
    """Anything else, with what is wrong for it."""

    values: tuple[Any, ...]

    def wrong(self) -> Iterator[tuple[str, Any]]:
        yield from ((repr(value)[:40], value) for value in self.values)


@dataclass
class Entry:
    """One public function, the arguments of a call that would be right, and what is said of each."""

    function: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, Any]
    free: set[str] = field(default_factory=set)  # taken and not looked at: kept for callers that pass them
    called: dict[str, str] = field(default_factory=dict)  # parameters under another name in errors

    def right(self) -> dict[str, Any]:
        """Arguments for a call that could be made."""
        missing = {
            name: kind.good
            for name in inspect.signature(self.function).parameters
            if name not in self.good and isinstance(kind := self.kinds.get(name), Tensor)
        }
        return {**missing, **self.good}

    def wrong_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(what, the name that the error must have, arguments)."""
        for name, kind in self.kinds.items():
            for label, bad in kind.wrong():
                yield f"{name}: {label}", self.called.get(name, name), {**self.good, name: bad}


# ---- what was not refused ----


def refused(entries: dict[str, Entry]) -> list[str]:
    """What was not refused as it should be. All of them, so that one run tells."""
    faults = []
    for title, entry in entries.items():
        for what, named, arguments in entry.wrong_calls():
            try:
                entry.function(**arguments)
            except ArgumentError as error:
                text = str(error)
                if not re.search(named, text):
                    faults.append(f"{title}, {what}: the error does not name {named!r}: {text}")
                if not HELPS.search(text):
                    faults.append(f"{title}, {what}: the error does not say what is allowed: {text}")
            except Exception as error:
                faults.append(f"{title}, {what}: {type(error).__name__}: {str(error)[:200]}")
            else:
                faults.append(f"{title}, {what}: not refused")
    return faults


def told(of_ranks: list[list[str]]) -> None:
    """Nothing was found."""
    faults = list(itertools.chain.from_iterable(of_ranks))
    assert not faults, "\n".join(faults)


def unnamed(owner: Any, entries: dict[str, Entry], free: set[str]) -> list[str]:
    """Public functions of `owner` and parameters of theirs that no table names."""
    found = []
    for name, function in inspect.getmembers(owner, callable):
        if (name.startswith("_") and name != "__init__") or name in free:
            continue
        parameters = set(inspect.signature(function).parameters) - {"self", "kwargs"}
        named: set[str] = set()
        for title, entry in entries.items():
            if title.split(" ")[0] == name:
                named |= set(entry.kinds) | entry.free
        found += [f"{name}({parameter})" for parameter in sorted(parameters - named)]
    return found


def not_closed(title: str, call: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with how a closed object answers, or None."""
    try:
        call(**arguments)
    except ClosedError:
        return None
    except Exception as error:
        return f"{title} when closed: {type(error).__name__}: {error}"
    return f"{title} when closed: not refused"


# ---- ops of a small shape ----


def made(comm: mori_shmem.Communicator, kind: str = "IntraNode", **more: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOPK,
        "max_num_inp_token_per_rank": MAX_TOKENS,
        "scale_dim": 2,
        "scale_type_size": 4,
        "kernel_type": Kind[kind],
        **more,
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **given), comm)


def in_order(op: EpDispatchCombineOp) -> None:
    """A right round trip."""
    given = fixture(op.config.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
    n = int(count)
    out, _ = op.combine(apply_experts(rows[:n], ids[:n], weights[:n], op.config), None, given.ids)
    assert not wrong_rows(out[:TOKENS], expected(given, EXPERTS))
