"""What the launches of one op share on this rank: where the parts of its window are, and the GPU's share."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from mori_shmem.jit import build, driver
from mori_shmem.jit.repeated import Repeated, repeated

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import Region
from mori_ep.plan import NOTHING_SAID, FewTokens
from mori_ep.targets.cuda import limits
from mori_ep.targets.cuda.layout import MOST_BLOCKS, Layout
from mori_ep.targets.cuda.params import MAX_RANKS, CombineParams, Common, DispatchParams
from mori_ep.targets.cuda.variants import combine_variant, dispatch_variant, tables_variant


@dataclass(frozen=True)
class Place:
    """One rank's op, for kernels."""

    config: EpDispatchCombineConfig
    layout: Layout
    bases: Sequence[int]  # of each rank's part of the window, as mapped here
    device: int
    blocks: int  # of a grid: what can be resident together, beside the other ranks on this GPU
    fault: int  # address of the fault record
    timeout_s: float
    wire_block: int = 128  # values that share a scale in fp8_blockwise
    few: FewTokens = NOTHING_SAID  # what the layout was made for

    @property
    def rank(self) -> int:
        return self.config.rank

    def mine(self, region: Region) -> int:
        """Address of a region of my part."""
        return self.bases[self.rank] + region.offset_bytes

    def comes_home_in_packets(self, tokens: int, low_latency: int) -> bool:
        """Whether the rows of so many tokens come home as packets. Asked by dispatch, which tells the others,
        and by combine: so nothing goes into it that the two do not share."""
        if low_latency < 0:
            return tokens <= limits.most_combine_packets(self.config, self.config.row_bytes)
        return bool(low_latency) and tokens <= limits.room_for_combine_packets(self.config, self.few)

    def repeated(
        self,
        launch: driver.PreparedLaunch,
        tensors: Sequence[torch.Tensor | None],
        places: Sequence[tuple[int, int]],
        results: object,
    ) -> Repeated | None:
        """Calls like the one that was launched."""
        return repeated(launch, tensors, places, results, fault=self.fault, device=self.device)

    def common(self, state: Region, nbytes: int) -> Common:
        """The arguments that all kernels of a direction have in common, but for those of a call."""
        config, window = self.config, (ctypes.c_void_p * MAX_RANKS)(*self.bases)
        return Common(
            nbytes=nbytes,
            world=config.world_size,
            rank=self.rank,
            max_tokens=config.max_num_inp_token_per_rank,
            top_k=config.num_experts_per_token,
            capacity=config.recv_capacity,
            alive=(1 << config.world_size) - 1,
            window=window,
            state=self.mine(state),
            fault=self.fault,
            timeout_ns=int(self.timeout_s * 1e9),
        )


def blocks_of(device: int, sharing: int) -> int:
    """An even share of the SMs: blocks that wait for each other must be resident together."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return max(2, min(count, MOST_BLOCKS) // sharing)


# ---- compiled code, loaded once a process and device ----


@functools.cache
def dispatch_module(device: int) -> driver.Module:
    return checked_module(build(dispatch_variant()), "dispatch_params_bytes", ctypes.sizeof(DispatchParams))


@functools.cache
def combine_module(device: int, dtype: torch.dtype, quant_type: str) -> driver.Module:
    cubin = build(combine_variant(dtype, quant_type))
    return checked_module(cubin, "combine_params_bytes", ctypes.sizeof(CombineParams))


@functools.cache
def tables_module(device: int) -> driver.Module:
    return driver.Module(build(tables_variant()))


def checked_module(cubin: bytes, constant: str, nbytes: int) -> driver.Module:
    """Loaded, and its struct of arguments found to have as many bytes as ours."""
    module = driver.Module(cubin)
    if module.constant(constant) != nbytes:
        raise RuntimeError(
            f"{constant}: Python's struct has {nbytes} bytes, the kernel's "
            f"{module.constant(constant)}; the two must hold the same fields"
        )
    return module
