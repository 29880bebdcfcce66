"""Tuned rules at the door of an op: how its calls are launched, and one line that says why.

    when the op is made   all ranks agree on the rules they look in (mori_tune.agreed_book); each phase is
                          looked up for as many tokens as fit, and says what it found
    first call of n       the rule for this phase, its own dtype, hidden size and n tokens; kept for later
                          calls
    by hand               no rule is looked up: `geometry=` was given to the op, or
                          MORI_EP_LAUNCH_CONFIG_MODE=MANUAL. A call that names blocks or warps gets those
Each phase is looked up with its own dtype, said outright. What is tuned is how rows travel, never what they
are.

Where there is something to tune: on cuda both phases of every call; on the host how an IntraNode op
dispatches (counts first, or blocks by source: one lookup, for as many tokens as fit, decides for all of its
calls), and across nodes how a call of InterNode does (rows compact, or runs of tokens as they are). The host
has no shipped rules; there nothing is looked up, or said, until rules for it exist.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError
from mori_shmem.settings import Snapshot
from mori_tune import (
    EP_COMBINE,
    EP_DISPATCH,
    Book,
    Decision,
    Device,
    Query,
    agreed_book,
    book_for,
    host_device,
    torch_device,
)
from mori_tune.rules.files import Rule

from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.keys import FORMATS, geometry_of, query_for
from mori_ep.plan import NOTHING_SAID, PLANNED, FewTokens, Geometry
from mori_ep.settings import INTERNODE_LL_TOKENS, KERNELS
from mori_ep.targets import Runner

log = logging.getLogger("mori_ep")
PACKAGE = "mori_ep"
DTYPES = {  # as rule files name them
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e4m3fnuz: "fp8_e4m3_fnuz",
    torch.float4_e2m1fn_x2: "fp4",
    torch.uint8: "fp4",
}


def is_tuned(backend: str, config: EpDispatchCombineConfig) -> bool:
    """Whether such an op has anything that a rule could choose."""
    if backend == "host":
        return config.kernel_type is EpDispatchCombineKernelType.IntraNode and not config.elastic
    if backend == "internode":
        return config.kernel_type is EpDispatchCombineKernelType.InterNode
    return backend == "cuda"


def choices_of(backend: str) -> tuple[str, ...]:
    """The phases that a rule can change anything in, call by call."""
    return {"cuda": ("dispatch", "combine"), "internode": ("dispatch",)}.get(backend, ())


def device_of(backend: str, index: int | None) -> Device:
    """As rule files name it."""
    return torch_device(index or 0) if backend == "cuda" else host_device()


class Rules:
    """One op's rules on this rank; the same on all ranks."""

    def __init__(
        self,
        comm: mori_shmem.Communicator,
        config: EpDispatchCombineConfig,
        dtypes: Mapping[str, torch.dtype],
        by_hand: Mapping[str, Geometry] | None,
        values: Snapshot,
    ) -> None:
        """Collective. `dtypes` by phase, as the op was made for; `by_hand` by phase, where a caller wants no
        rules."""
        unknown = sorted(set(by_hand or ()) - set(FORMATS))
        if unknown:
            raise ArgumentError(f"geometry has {', '.join(unknown)}: its keys are {', '.join(FORMATS)}")
        self._config, self._dtypes, self._by_hand = config, dtypes, by_hand
        self._phases = choices_of(comm.backend)
        self._runner: Runner | None = None
        self._warned: set[str] = set()
        self._book: Book | None = None
        self._manual = "geometry was given by the caller" if by_hand is not None else None
        if values[KERNELS] != "own":
            self._manual = f"kernels={values[KERNELS]!r} have no geometry"
        if comm.backend == "internode" and values.origin(INTERNODE_LL_TOKENS) != "default":
            self._manual = self._manual or f"{INTERNODE_LL_TOKENS.variable} was set"
        if is_tuned(comm.backend, config):
            self._device = device_of(comm.backend, comm.device.index)
            book = book_for("ep", (EP_DISPATCH, EP_COMBINE), PACKAGE)
            book = agreed_book(book, self._device, comm.all_gather)
            if comm.backend == "cuda" or book.knows(self._device):
                self._book = book
                self._check()

    # ---- what there is ----

    def decision(
        self, phase: str, dtype: torch.dtype, *, tokens: int, hidden: int, zero_copy: bool = False
    ) -> Decision | None:
        """The rule for calls of this phase and dtype, or why there is none; None where nothing is tuned."""
        if self._book is None:
            return None
        return self._book.look_up(self._query(phase, dtype, tokens, hidden, zero_copy), manual=self._manual)

    def _query(self, phase: str, dtype: torch.dtype, tokens: int, hidden: int, zero_copy: bool) -> Query:
        config = self._config
        return query_for(
            phase,
            DTYPES[dtype],
            kernel_type=config.kernel_type.name,
            num_ranks=config.world_size,
            hidden=hidden,
            topk=config.num_experts_per_token,
            tokens=tokens,
            zero_copy=zero_copy,
            quant_type=config.quant_type,
            device=self._device,
        )

    def _check(self) -> None:
        """All rules for such ops are read now: a bad one is refused before anybody waits."""
        for phase in FORMATS:
            for rule in self._rules_of(phase):
                geometry_of(FORMATS[phase].params_in(rule.values), rule.place)

    def _rules_of(self, phase: str) -> list[Rule]:
        """For this architecture and header: those that a lookup may come to, whatever its policy."""
        return [] if self._book is None else self._book.rules_for(self._full(phase))

    def _full(self, phase: str) -> Query:
        """The key of a call that fills the op."""
        config = self._config
        zero_copy = not config.use_external_inp_buf
        tokens = config.max_num_inp_token_per_rank
        return self._query(phase, self._dtypes[phase], tokens, config.hidden_dim, zero_copy)

    # ---- when the op is made ----

    def few_tokens(self) -> FewTokens:
        """What a plan has to know before there is memory. Says what was found for a full call."""
        if self._by_hand is not None:
            given = {phase: self._by_hand.get(phase, PLANNED).low_latency for phase in FORMATS}
            tokens = self._config.max_num_inp_token_per_rank
            most = {phase: tokens if given[phase] == 1 else 0 for phase in FORMATS}
            return FewTokens(given["dispatch"], **most)
        if self._book is None or self._book.manual or self._manual:
            return NOTHING_SAID
        most = {
            phase: max(
                (
                    r.values["num_tokens"]
                    for r in self._rules_of(phase)
                    if r.values.get("low_latency") == "yes"
                ),
                default=0,
            )
            for phase in FORMATS
        }
        config, dtype = self._config, self._dtypes["dispatch"]
        full = self._found(
            "dispatch", dtype, config.max_num_inp_token_per_rank, config.hidden_dim, zero_copy=False
        )
        return FewTokens(full.low_latency, **most)

    def announce(self, runner: Runner) -> None:
        """Say what each phase gets in calls that fill the op; from now on `runner` may refuse a geometry."""
        self._runner = runner
        config, zero_copy = self._config, not self._config.use_external_inp_buf
        for phase in self._phases or ("dispatch",):
            tokens, hidden = config.max_num_inp_token_per_rank, config.hidden_dim
            self.decision(phase, self._dtypes[phase], tokens=tokens, hidden=hidden, zero_copy=zero_copy)

    # ---- calls ----

    def take(self, by_hand: Mapping[str, Geometry]) -> None:
        """Another geometry by hand."""
        self._by_hand = by_hand

    def geometry(
        self, phase: str, dtype: torch.dtype, *, tokens: int, hidden: int, zero_copy: bool = False
    ) -> Geometry:
        """How a call of this phase is launched."""
        if self._by_hand is not None:
            return self._by_hand.get(phase, PLANNED)
        return self._found(phase, dtype, tokens, hidden, zero_copy) if phase in self._phases else PLANNED

    def _found(self, phase: str, dtype: torch.dtype, tokens: int, hidden: int, zero_copy: bool) -> Geometry:
        """What the rules say. One that does not fit this rank's GPU is left, aloud."""
        decision = self.decision(phase, dtype, tokens=tokens, hidden=hidden, zero_copy=zero_copy)
        if decision is None or decision.params is None:
            return PLANNED
        assert decision.rule is not None
        found = geometry_of(decision.params, decision.rule.place)
        reason = None if self._runner is None else self._runner.why_not_launch(found)
        most = decision.rule.values["num_tokens"]
        if found.low_latency == 1 and tokens > most:
            reason = f"{tokens} tokens, and its way for few was tried with {most}"
        if reason is None:
            return found
        if decision.rule.place not in self._warned:
            self._warned.add(decision.rule.place)
            log.warning(
                "ep %s: the rule at %s does not fit here: %s; the built-in default is used",
                *(phase, decision.rule.place, reason),
            )
        return PLANNED

    def homeward(self) -> Callable[[int], int]:
        """By tokens: how their rows come home. From the configuration alone, so that a dispatch tells its
        peers what the combine will do."""
        config, dtype = self._config, self._dtypes["combine"]
        zero_copy = not config.use_external_inp_buf

        def of(tokens: int) -> int:
            return self.geometry(
                "combine", dtype, tokens=tokens, hidden=config.hidden_dim, zero_copy=zero_copy
            ).low_latency

        return functools.lru_cache(None)(of)
