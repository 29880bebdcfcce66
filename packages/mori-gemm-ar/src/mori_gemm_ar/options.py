"""What may be chosen, what goes with what, and what is refused because nothing would come of it.

    mode         partial sums travel by                          finished rows travel by, unless chosen
    gemm-only    not at all: the rank's own partial is returned  -
    split-sdma   copy engines, after the GEMM                    sdma
    fused-sdma   copy engines, chunk by chunk during the GEMM    sdma
    split-lsa    the owner's loads from the peers' C             lsa
    fused-lsa    the GEMM's own stores into the owner's memory   lsa

With gather_dtype="fp8" finished rows travel as e4m3fn, by lsa unless chosen, under fp32 scales of amax / 448:
    gather_scale="row"      one a row; a code is value / scale
    gather_scale="1x128"    one for every 128 columns of a row; a code is value * (1 / scale)
The two are different bits of the same accuracy (2.65e-2, 2.57e-2), and a target says which it can do: a fused
epilogue sees 128 columns of a row at a time, and the maximum of the whole row only when it is too late.
An option that the chosen mode would ignore is an error: a number measured with it would belong to another
variant than its reader thinks. None means "the default", and is always fine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mori_shmem.errors import ArgumentError

MODES = ("gemm-only", "split-sdma", "fused-sdma", "split-lsa", "fused-lsa")
QUANTS = ("blockscale", "ptpc", "mxfp8")
GATHER_DTYPES = ("bf16", "fp8")
GATHER_TRANSPORTS = ("sdma", "lsa")
GATHER_SCALES = ("row", "1x128")
SMALL_M = ("one-stage", "two-stage", "auto")
PUBLISH = ("writethrough", "fence")
MAX_PARTS = 64  # chunks of a slice, bands of a gather: one flag each
MAX_QUEUES = 8
MAX_PULL_BLOCKS = 4096
MAX_BAND_ROWS = 1 << 16
MAX_LAG = 128

DEFAULT_CHUNKS = 8  # 8x MI355X, M=15360: 1104.8 us, against 1434.0 us with one chunk
DEFAULT_GATHER_BANDS = 4  # 8x MI355X: the best of 1, 4, 8, 16, 32, though no better than not fusing


@dataclass(frozen=True)
class Options:
    """A complete, consistent choice. Made by `resolve`; None stands where an option does not apply."""

    mode: str
    quant: str
    gather_dtype: str | None
    gather_transport: str | None
    chunks: int | None  # at most so many puts per destination, fused-sdma
    sdma_queues: int | None  # per peer, where copy engines carry anything
    fuse_quantize: bool
    fuse_reduce_push: bool
    gather_bands: int | None  # puts per peer of fuse_reduce_push
    publish: str | None  # how fuse_reduce_push hands a band over
    pull_blocks: int | None  # pieces that a pull is cut into, gather_transport lsa
    band_rows: int | None = (
        None  # fused kernels that push tiles: rows of a band; None: as the target was tuned
    )
    lag: int | None = None  # the same: how many bands local tiles stay behind remote ones
    gather_scale: str | None = None  # what a scale of the fp8 gather covers
    small_m: str | None = None  # fused modes: how calls too small to profit are summed instead; None: as all
    small_m_below: int | None = None  # calls of fewer rows than this

    @property
    def communicates(self) -> bool:
        """Whether ranks meet at all."""
        return self.mode != "gemm-only"

    @property
    def scatters_by_sdma(self) -> bool:
        """Whether copy engines carry the partial sums."""
        return self.mode.endswith("-sdma")

    @property
    def uses_queues(self) -> bool:
        """Whether copy engines carry anything."""
        return self.communicates and (self.scatters_by_sdma or self.gather_transport == "sdma")


def resolve(
    *,
    mode: str = "fused-sdma",
    quant: str = "blockscale",
    gather_dtype: str | None = None,
    gather_transport: str | None = None,
    chunks: int | None = None,
    sdma_queues: int | None = None,
    fuse_quantize: bool | None = None,
    fuse_reduce_push: bool | None = None,
    gather_bands: int | None = None,
    publish: str | None = None,
    pull_blocks: int | None = None,
    band_rows: int | None = None,
    lag: int | None = None,
    gather_scale: str | None = None,
    small_m: str | None = None,
    small_m_below: int | None = None,
    default_pull_blocks: int = 1,
    default_chunks: int = DEFAULT_CHUNKS,
    default_gather_scale: str = "row",
) -> Options:
    """The complete choice that the given ones lead to, or an ArgumentError with every reason against them."""
    given = {
        "gather_dtype": _one_of("gather_dtype", gather_dtype, GATHER_DTYPES),
        "gather_transport": _one_of("gather_transport", gather_transport, GATHER_TRANSPORTS),
        "chunks": _in_range("chunks", chunks, MAX_PARTS),
        "sdma_queues": _in_range("sdma_queues", sdma_queues, MAX_QUEUES),
        "fuse_quantize": _flag("fuse_quantize", fuse_quantize) or None,  # False asks for nothing
        "fuse_reduce_push": _flag("fuse_reduce_push", fuse_reduce_push) or None,
        "gather_bands": _in_range("gather_bands", gather_bands, MAX_PARTS),
        "publish": _one_of("publish", publish, PUBLISH),
        "pull_blocks": _in_range("pull_blocks", pull_blocks, MAX_PULL_BLOCKS),
        "band_rows": _in_range("band_rows", band_rows, MAX_BAND_ROWS),
        "lag": _in_range("lag", lag, MAX_LAG),
        "gather_scale": _one_of("gather_scale", gather_scale, GATHER_SCALES),
        "small_m": _one_of("small_m", small_m, SMALL_M),
        "small_m_below": _in_range("small_m_below", small_m_below, 1 << 24),
    }
    _one_of("mode", mode, MODES, optional=False)
    _one_of("quant", quant, QUANTS, optional=False)

    communicates, pushes_bands = mode != "gemm-only", bool(fuse_reduce_push)
    dtype = gather_dtype or "bf16"
    transport = gather_transport or ("lsa" if dtype == "fp8" or mode.endswith("-lsa") else "sdma")
    queues = communicates and (mode.endswith("-sdma") or transport == "sdma")
    options = Options(
        mode=mode,
        quant=quant,
        gather_dtype=dtype if communicates else None,
        gather_transport=transport if communicates else None,
        chunks=(chunks or default_chunks) if mode == "fused-sdma" else None,
        sdma_queues=(sdma_queues or 1) if queues else None,
        fuse_quantize=bool(fuse_quantize),
        fuse_reduce_push=pushes_bands,
        gather_bands=(gather_bands or DEFAULT_GATHER_BANDS) if pushes_bands else None,
        publish=(publish or "writethrough") if pushes_bands else None,
        pull_blocks=(pull_blocks or default_pull_blocks) if communicates and transport == "lsa" else None,
        band_rows=band_rows,
        lag=lag,
        gather_scale=(gather_scale or default_gather_scale) if communicates and dtype == "fp8" else None,
        small_m=small_m,
        small_m_below=small_m_below,
    )
    reasons = [
        f"{name}={value!r} {reason}"
        for name, value in given.items()
        if value is not None
        for reason in _against(name, options)
    ]
    if reasons:
        raise ArgumentError(f"mode={mode!r}: " + "; ".join(reasons))
    return options


def _against(name: str, chosen: Options) -> Iterator[str]:
    """Why this option, once given, cannot be honoured or would change nothing."""
    if not chosen.communicates:
        yield "has no effect: gemm-only does not communicate"
        return
    if name == "chunks" and chosen.chunks is None:
        yield "has no effect: only fused-sdma sends a slice chunk by chunk"
    if name == "chunks" and chosen.band_rows is not None:
        yield "has no effect beside band_rows, which says the same in rows; give one of them"
    if name == "sdma_queues" and chosen.sdma_queues is None:
        yield "has no effect: neither partial sums nor finished rows travel by copy engine here"
    if name == "fuse_quantize" and chosen.gather_dtype != "fp8":
        yield "has no effect: nothing is quantised with gather_dtype='bf16'; pass gather_dtype='fp8'"
    if name == "fuse_reduce_push" and chosen.gather_transport != "sdma":
        yield "cannot be honoured: by 'lsa' peers pull and nothing is pushed; pass gather_transport='sdma'"
    if name == "fuse_reduce_push" and chosen.gather_dtype == "fp8" and not chosen.fuse_quantize:
        yield "cannot be honoured: a reduce can push only what it quantised itself; add fuse_quantize=True"
    if name in ("gather_bands", "publish") and not chosen.fuse_reduce_push:
        yield "has no effect without fuse_reduce_push=True"
    if name == "pull_blocks" and chosen.gather_transport != "lsa":
        yield "has no effect: nothing is pulled with gather_transport='sdma'"
    if name == "gather_scale" and chosen.gather_dtype != "fp8":
        yield "has no effect: rows have scales only with gather_dtype='fp8'"
    if name == "small_m" and not chosen.mode.startswith("fused"):
        yield "has no effect: only a fused mode has something to do instead"
    if name == "small_m_below" and chosen.small_m is None:
        yield "has no effect without small_m"
    if name == "band_rows" and not chosen.mode.startswith("fused"):
        yield "has no effect: only the fused modes go band by band"
    if name == "lag" and (chosen.mode != "fused-lsa" or chosen.gather_transport != "lsa"):
        yield "has no effect: behind copy engines all remote bands go first"


def _one_of(name: str, value: str | None, allowed: tuple[str, ...], *, optional: bool = True) -> str | None:
    if value not in allowed and not (optional and value is None):
        raise ArgumentError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
    return value


def _in_range(name: str, value: int | None, highest: int) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= highest):
        raise ArgumentError(f"{name}={value!r}: a whole number from 1 to {highest}")
    return value


def _flag(name: str, value: bool | None) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise ArgumentError(f"{name}={value!r}: allowed are True, False, and None for the default (False)")
    return value
