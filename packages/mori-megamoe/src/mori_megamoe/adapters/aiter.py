"""Stage1 over copy engines for aiter's MegaMoEV2: finds out what that layer is, puts callables into the
places of its Stage1 launches, and takes them out again.

    stage1 = AiterStage1Sdma(moe, comm).install()     # moe: a MegaMoEV2, the same choices on all ranks
    out = moe.forward(x, weights, ids)
    stage1.uninstall()

What it goes into. aiter's package with the layer is in its source trees since August 2026; no amd-aiter wheel
on the package index has it (the newest is of 2025). Trees differ, so everything is looked for by name and by
signature, nothing by version (aiter_found.py). `AiterStage1Sdma(...).found` says what is there.

What runs. The kernels that these callables start are for gfx950, and *this version has none*: `install` then
refuses, and names that with all else that is missing. Whoever has kernels passes them (`kernels=`, Kernels).

What it keeps to.
  - prepare, Stage2 and combine stay aiter's. With fuse_quant, prepare only plans: its rows are not quantised
    there, the kernels get the bf16 rows of the same call.
  - Weights, tables and tensors are those of each call, none are kept: frameworks swap layers' weights.
  - uninstall() puts back the very objects that install() found.
  - Graphs captured before install() or uninstall() replay what they captured. Capture them anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mori_shmem
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, MoriError, UnsupportedShape

from mori_megamoe.adapters.aiter_found import BLOCKS_M, STAGE1_ARGUMENTS, Found, reasons_against
from mori_megamoe.stage1.options import Options
from mori_megamoe.together import together

_QUANT_POINTERS = slice(5, 8)  # of prepare's arguments: bf16 rows, their codes, their scales
_MARK = "_mori_megamoe"  # on callables of ours


class AiterRefused(MoriError, RuntimeError):
    """This layer cannot have our Stage1; `reasons` has a sentence for each cause."""

    reasons: tuple[str, ...] = ()


class Stage1Call(NamedTuple):
    """The arguments of one launch, in aiter's order, by our names."""

    out: Any  # [capacity, I] e4m3
    rows: Any  # [capacity, D] e4m3: where aiter lands rows; ours land elsewhere
    w1: Any
    row_scales: Any
    w1_scale: Any
    tile_row_base: Any
    sorted_expert_ids: Any
    num_valid: Any
    out_scales: Any
    capacity: Any  # from here on the DSL's integers; addresses are 64 bits
    dispatch_table: Any
    num_tokens: Any
    x: Any
    topk_ids: Any
    weights: Any
    scales: Any
    parity: Any
    expected: Any


@dataclass(frozen=True)
class Launch:
    """What kernels get."""

    call: Stage1Call
    stream: Any
    block_m: int
    scale_mode: str  # "shuffler" or "ldsw"
    x_bf16: Any  # with fuse_quant the address of this call's rows, else None
    compiled_for: Mapping[str, Any]  # aiter's keywords: what its own kernel would be compiled for


class Kernels(Protocol):
    """Stage1 on one kind of GPU."""

    def open(self, found: Found, options: Options, comm: mori_shmem.Communicator) -> None:
        """Collective: windows (found.landing_bytes, found.slab_bytes) and queues."""

    def launch(self, launch: Launch) -> None:
        """Dispatch and GEMM1 on the launch's stream."""

    def close(self) -> None:
        """Give back what `open` made."""


class AiterStage1Sdma:
    """See the module."""

    def __init__(
        self,
        moe: Any,
        comm: mori_shmem.Communicator,
        *,
        scale_mode: str = "auto",
        fuse_quant: bool = False,
        gemm1: str | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        """Local; only looks. Choices as MegaMoEStage1Sdma has them; "auto" goes by the rows of a tile."""
        self.options = Options(scale_mode, fuse_quant, gemm1)
        self.options.check()
        if not all(hasattr(comm, name) for name in ("backend", "rank", "world_size", "all_gather")):
            raise ArgumentError(f"comm is {described(comm)}: a communicator of mori_shmem.init is needed")
        if kernels is not None and not all(hasattr(kernels, name) for name in ("open", "launch", "close")):
            raise ArgumentError(
                f"kernels is {described(kernels)}: an object with open, launch and close is needed "
                "(Kernels), or None"
            )
        self.moe, self.comm, self._kernels = moe, comm, kernels
        self.found = Found.of(moe)
        self._originals: dict[str, Callable[..., Any]] = {}
        self._x_bf16: Any = None

    def reasons(self) -> list[str]:
        """Why install() would refuse; empty if it would not."""
        found = reasons_against(self.found, self.options, self.comm)
        if _is_ours(getattr(self.moe, "_s1_mega", None)):
            found.append("another Stage1 of mori-megamoe is installed in this layer: uninstall that first")
        if self._kernels is None:
            found.append(
                "this version of mori-megamoe has no Stage1 kernels for gfx950: it can only be installed "
                "with kernels= of your own"
            )
        return found

    def install(self) -> AiterStage1Sdma:
        """Collective. From the next call on the layer launches our Stage1; raises AiterRefused."""
        if self._originals:
            raise MoriError("this AiterStage1Sdma is installed already: uninstall() it first")
        reasons = self.reasons()
        if reasons or self._kernels is None:
            raise _refused(self.found, reasons)
        kernels = self._kernels
        together(
            self.comm,
            "kernels cannot be opened",
            lambda: kernels.open(self.found, self.options, self.comm),
        )
        ours: dict[str, Callable[..., Any]]
        ours = {"_s1_mega": self._mega, "_s1_mega_bundle": self._mega_bundle}
        if self.options.fuse_quant:
            ours["_s1_prepare"] = self._prepare
        for name, call in ours.items():
            self._originals[name] = original = getattr(self.moe, name)
            setattr(self.moe, name, _in_place_of(original, call))
        return self

    def uninstall(self) -> None:
        """Collective. What install() found is back from the next call on."""
        if not self._originals:
            raise MoriError("this AiterStage1Sdma is not installed")
        for name, original in self._originals.items():
            setattr(self.moe, name, original)
        self._originals.clear()
        if self._kernels is not None:
            self._kernels.close()

    # ---- in the places of aiter's callables: their arguments ----

    def _mega(self, *args: Any, sort_block_m: int, **compiled_for: Any) -> None:
        """(18 arguments, stream)"""
        *call, stream = args
        self._start(call, stream, sort_block_m, compiled_for)

    def _mega_bundle(self, *args: Any, variants: Sequence[Any], **compiled_for: Any) -> None:
        """(18 arguments, variant, stream)"""
        *call, variant, stream = args
        self._start(call, stream, variants[variant].sort_block_m, compiled_for)

    def _prepare(self, *args: Any, num_quant_cu: int, **compiled_for: Any) -> None:
        """Without quantising. A call that brings quantised rows has no workgroups for that anyway."""
        rows, *made = args[_QUANT_POINTERS]
        self._x_bf16 = rows if num_quant_cu else None
        zeros = [type(address)(0) for address in (rows, *made)]
        planned = [*args[: _QUANT_POINTERS.start], *zeros, *args[_QUANT_POINTERS.stop :]]
        self._originals["_s1_prepare"](*planned, num_quant_cu=0, **compiled_for)

    def _start(
        self, given: Sequence[Any], stream: Any, block_m: int, compiled_for: Mapping[str, Any]
    ) -> None:
        assert self._kernels is not None
        if len(given) != STAGE1_ARGUMENTS:
            raise ArgumentError(
                f"aiter launched Stage1 with {len(given)} arguments, {STAGE1_ARGUMENTS} are known: this tree "
                "is a newer one than this adapter"
            )
        if block_m not in BLOCKS_M:
            raise UnsupportedShape(
                f"aiter chose tiles of {block_m} rows for this number of tokens; there is a Stage1 over copy "
                f"engines for {' and '.join(map(str, BLOCKS_M))}"
            )
        x_bf16, self._x_bf16 = self._x_bf16, None
        if self.options.fuse_quant and x_bf16 is None:
            raise ArgumentError(
                "forward_prequant with fuse_quant=True: there are no bf16 rows to quantise on their way. "
                "Install with fuse_quant=False, or call forward"
            )
        mode = self.options.scale_mode
        if mode == "auto":
            mode = "shuffler" if block_m == max(BLOCKS_M) else "ldsw"
        call = Stage1Call(*given)
        self._kernels.launch(Launch(call, stream, block_m, mode, x_bf16, dict(compiled_for)))


def _in_place_of(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function with the signature of the one that it stands for."""

    @functools.wraps(original)
    def call(*args: Any, **keywords: Any) -> Any:
        return ours(*args, **keywords)

    setattr(call, _MARK, True)
    return call


def _is_ours(callable_: object) -> bool:
    return getattr(callable_, _MARK, False) is True


def _refused(found: Found, reasons: Sequence[str]) -> AiterRefused:
    numbered = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, 1))
    error = AiterRefused(f"Stage1 over copy engines cannot go into this layer: {numbered}. Found: {found}")
    error.reasons = tuple(reasons)
    return error
