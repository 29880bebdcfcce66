"""How the rules of a phase are keyed: which fields, which must be equal, which may differ in a near rule.

A file holds tables; a table has a header and rules. The header fields, with the device, say what all
its rules are for. In a rule, the `exact` fields must always be equal; the `preferred` ones are given up from
the right where no rule has them; of the `size`, the smallest rule at or above the call's is nearest, else the
largest. A field in `wildcard` may be absent from a rule, which then serves every value of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mori_tune.device import Device
from mori_tune.errors import RulesError

VERSION = "2.0"
OLDER_VERSIONS = ("1.0",)  # the same fields without `op` and provenance; one table a file
DEVICE_FIELDS = ("gpu_arch", "gpu_model")


@dataclass(frozen=True)
class Format:
    op: str
    phase: str
    header: tuple[str, ...]  # besides the device and the phase
    exact: tuple[str, ...]
    preferred: tuple[str, ...]
    size: str
    params: tuple[str, ...]
    mode_params: tuple[str, ...] = ()  # present where the mode has them
    wildcard: tuple[str, ...] = ()
    world: str = "world_size"  # which header field holds the number of ranks
    world_letter: str = "w"

    def params_in(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The tuned values of a rule, in the order of the format."""
        return {name: values[name] for name in (*self.params, *self.mode_params) if name in values}

    @property
    def key(self) -> tuple[str, ...]:
        """What tells two rules of a table apart, in the order in which rules are sorted."""
        return (*self.exact, *self.preferred, self.size)

    def file_name(self, device: Device, header: Mapping[str, Any]) -> str:
        words = [str(header[name]) for name in self.header if name != self.world]
        words = [device.arch, device.model, *words, f"{self.world_letter}{header[self.world]}", self.phase]
        return re.sub(r"[^\w.-]", "-", "_".join(words)) + ".json"

    def passes(self, asked: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
        """Which preferred fields must be equal, strictest first: (a, b), (a), (b), ()."""
        given = [name for name in self.preferred if asked.get(name) is not None]
        for keep in product((True, False), repeat=len(given)):
            yield tuple(name for name, kept in zip(given, keep, strict=True) if kept)


@dataclass(frozen=True)
class Query:
    """A rule's full key: phase and dtype are said outright, never taken from a configuration in passing."""

    format: Format
    device: Device
    header: Mapping[str, Any]
    key: Mapping[str, Any]  # a wildcard field may be absent or None

    def __post_init__(self) -> None:
        wrong_header = set(self.header) ^ set(self.format.header)
        missing = set(self.format.key) - set(self.format.wildcard) - set(self.key)
        unknown = set(self.key) - set(self.format.key)
        if wrong_header or missing or unknown:
            raise RulesError(
                f"query of {self.format.op} {self.format.phase}: header {sorted(self.header)} (wanted "
                f"{sorted(self.format.header)}), key {sorted(self.key)} (wanted {sorted(self.format.key)})"
            )

    @property
    def full_header(self) -> dict[str, Any]:
        """The header as a file spells it."""
        device = dict(zip(DEVICE_FIELDS, (self.device.arch, self.device.model), strict=True))
        return {**device, **self.header, "phase": self.format.phase}

    def __str__(self) -> str:
        fields = {**self.full_header, **self.key}
        return " ".join(f"{name}={value}" for name, value in fields.items() if name != "phase")


EP_PARAMS = ("block_num", "rdma_block_num", "warp_per_block")
EP_HEADER = ("kernel_type", "ep_size")
EP_DISPATCH = Format(
    op="ep",
    phase="dispatch",
    header=EP_HEADER,
    exact=("dtype",),
    preferred=("hidden_dim", "topk"),
    size="num_tokens",
    params=EP_PARAMS,
    mode_params=("low_latency",),  # where a call may go by the way for few tokens or by that for many
    wildcard=("topk",),
    world="ep_size",
    world_letter="ep",
)
EP_COMBINE = replace(EP_DISPATCH, phase="combine", exact=("dtype", "zero_copy", "quant_type"))
GEMM_AR = Format(
    op="gemm-ar",
    phase="layer",
    header=("mode", "world_size"),
    exact=("quant", "gather_dtype", "gather_transport"),
    preferred=("n", "k"),
    size="m",
    params=(),
    mode_params=(
        *("tile", "chunks", "sdma_queues", "reduce_blocks", "pull_blocks", "gather_bands"),
        *("band_rows", "lag"),
    ),
)
