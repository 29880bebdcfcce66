"""Tuned rules at the door of an op: which geometry its calls get, and one line that says why.

    when the op is made   all ranks agree on the rules they look in (mori_tune.agreed_book)
    first call of an M    the rule for this device, ranks, mode, wire, n, k and M; its values replace the
                          defaults in this M's plan
    MANUAL                no rule is looked up: the caller gave one of the tuned numbers, or tuned=False, or
                          MORI_GEMM_AR_LAUNCH_CONFIG_MODE=MANUAL
What is tuned is how a call is cut, never what it computes: with or without a rule the bits are the same.

The host is tuned by nobody and has no shipped rules; there nothing is looked up, or said, until rules for
it exist. Nobody has swept the rocm target: no hardware has run it, `mori-tune` refuses it, and it looks
nothing up; its defaults are published figures (targets/rocm/limits.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection

import mori_shmem
from mori_tune import (
    GEMM_AR,
    Book,
    Decision,
    Device,
    GemmArShape,
    Query,
    RulesError,
    agreed_book,
    book_for,
    host_device,
    torch_device,
)
from mori_tune.spaces.gemm_ar import parameters_of

from mori_gemm_ar.options import DEFAULT_CHUNKS, Options

PACKAGE = "mori_gemm_ar"
TUNED_BACKENDS = ("host", "cuda")


def shape_of(m: int, num_ranks: int, backend: str, options: Options, band_rows: int = 256) -> GemmArShape:
    """What mori-tune knows a call by. `band_rows`: rows of a band where no number says so."""
    dtype, transport = options.gather_dtype or "bf16", options.gather_transport
    return GemmArShape(m, num_ranks, options.mode, backend, dtype, transport, band_rows=band_rows)


def tuned_names(num_ranks: int, backend: str, options: Options) -> tuple[str, ...]:
    """The numbers that sweeps of such an op vary; none where ranks do not meet."""
    if num_ranks == 1 or not options.communicates or backend not in TUNED_BACKENDS:
        return ()
    return tuple(p.name for p in parameters_of(shape_of(1, num_ranks, backend, options)))


def device_of(backend: str, index: int | None) -> Device:
    """As rule files name it."""
    return host_device() if backend == "host" else torch_device(index or 0)


def query_for(m: int, n: int, k: int, num_ranks: int, options: Options, device: Device) -> Query:
    """The key of one M's rule."""
    wire = {"gather_dtype": options.gather_dtype, "gather_transport": options.gather_transport}
    header = {"mode": options.mode, "world_size": num_ranks}
    return Query(GEMM_AR, device, header, {"quant": options.quant, **wire, "n": n, "k": k, "m": m})


class Rules:
    """One op's rules on this rank; the same on all ranks."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        options: Options,
        n: int,
        k: int,
        *,
        target: str | None = None,
        given: Collection[str],
        tuned: bool | None,
    ) -> None:
        """Collective. `given` are the options that the caller chose, `tuned` what he says of rules; `target`
        has rules if it is the backend's own, which is the default."""
        self._options, self._n, self._k, self._num_ranks = options, n, k, comm.world_size
        self._names = (
            tuned_names(comm.world_size, comm.backend, options) if target in (None, comm.backend) else ()
        )
        self._device = device_of(comm.backend, comm.device.index) if self._names else host_device()
        chosen = [name for name in self._names if name in given]
        self._manual = (
            "tuned=False was given"
            if tuned is False
            else f"{', '.join(chosen)} given by the caller"
            if chosen
            else None
        )
        book = book_for("gemm-ar", (GEMM_AR,), PACKAGE) if self._names else None
        self._book: Book | None = None if book is None else agreed_book(book, self._device, comm.all_gather)
        if self._book is not None and comm.backend == "host" and not self._book.knows(self._device):
            self._book = None
        self.options_for = functools.lru_cache(None)(self._options_for)

    def decision(self, m: int) -> Decision | None:
        """The rule for calls of m rows, or why there is none; None where nothing is tuned."""
        if self._book is None:
            return None
        query = query_for(m, self._n, self._k, self._num_ranks, self._options, self._device)
        return self._book.look_up(query, manual=self._manual)

    def _options_for(self, m: int) -> Options:
        """The op's options with the rule's numbers in them."""
        decision = self.decision(m)
        if decision is None or decision.params is None:
            return self._options
        assert decision.rule is not None
        return with_rule(self._options, decision.params, self._names, decision.rule.place)


def with_rule(options: Options, params: dict[str, object], names: Collection[str], place: str) -> Options:
    """`options` with a rule's numbers; RulesError for one that this op lacks, or that no sweep tries."""
    for name, value in params.items():
        most = DEFAULT_CHUNKS if name == "chunks" else 1 << 16
        if name not in names or type(value) is not int or not 1 <= value <= most:
            raise RulesError(
                f"{place}: {name}={value!r} for mode={options.mode!r}: rules of it hold {', '.join(names)}, "
                f"whole numbers from 1 to {most}; tune again, or remove the rule"
            )
    return dataclasses.replace(options, **params)  # type: ignore[arg-type]
