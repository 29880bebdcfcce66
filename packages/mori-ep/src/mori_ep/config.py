"""What an op is made for. The field names are those that serving engines fill in by inspection: a dataclass.

Sizes are capacities: a call may bring fewer tokens (also 0, also a different number on every rank) and a
smaller hidden size. Two fields of ours say more than `data_type` can: which dtypes the two phases will be
called with, so that what cannot be done is refused when the op is made and not in the first call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from mori_shmem.errors import ArgumentError, UnsupportedShape

if TYPE_CHECKING:
    import mori_shmem
    import torch

QUANT_TYPES = ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise")
MAX_TOPK = 31  # below the lanes of the narrowest warp
MAX_HIDDEN = (1 << 24) - 1  # what ranks tell each other has so many bits for it (signs.py)


class EpDispatchCombineKernelType(enum.IntEnum):
    """How rows travel. All give the same rows in the same order; the README has what each is for."""

    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4
    IntraNodeLL = 5

    @property
    def across_nodes(self) -> bool:
        return self.name.startswith("InterNode")


@dataclass
class EpDispatchCombineConfig:
    """Equal on all ranks but for `rank`; an op compares it when it is made."""

    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int  # elements of a row at most; of a packed dtype: pairs
    scale_dim: int  # scales of a row at most; 0: there are none
    scale_type_size: int  # bytes of one
    max_token_type_size: int  # bytes per element of the widest dtype that either phase is called with
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int  # expert e lives on rank e // num_experts_per_rank
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0  # above 0: each source may send at most ceil(this / world_size) rows
    use_external_inp_buf: bool = True  # False: combine reads the registered buffer
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"  # how combine's rows travel, see QUANT_TYPES
    dispatch_dtype: torch.dtype | None = None  # None: data_type
    combine_dtype: torch.dtype | None = None  # None: data_type where rows of it can be added, else bf16
    elastic: bool = False  # a rank that dies or is late is masked, and the others go on

    @classmethod
    def for_comm(
        cls,
        comm: mori_shmem.Communicator,
        *,
        num_experts: int,
        data_type: torch.dtype,
        hidden_dim: int,
        max_num_inp_token_per_rank: int,
        num_experts_per_token: int,
        **more: Any,
    ) -> EpDispatchCombineConfig:
        """The configuration of one op for the ranks of a communicator; `more` are fields of the class."""
        from mori_ep.arguments import check_dtype

        if type(getattr(comm, "world_size", None)) is not int:
            raise ArgumentError(
                f"comm={comm!r}: a communicator is needed, of mori_shmem.init or internode.join"
            )
        check_dtype("data_type", data_type)
        _check_whole("num_experts", num_experts, 1)
        if num_experts % comm.world_size:
            raise UnsupportedShape(
                f"num_experts={num_experts} cannot be shared out evenly among {comm.world_size} ranks: a "
                "multiple of the number of ranks is needed"
            )
        given: dict[str, Any] = {
            "scale_dim": 0,
            "scale_type_size": 1,
            "max_token_type_size": max(2, data_type.itemsize),
            **more,
        }
        return cls(
            data_type=data_type,
            rank=comm.rank,
            world_size=comm.world_size,
            hidden_dim=hidden_dim,
            max_num_inp_token_per_rank=max_num_inp_token_per_rank,
            num_experts_per_rank=num_experts // comm.world_size,
            num_experts_per_token=num_experts_per_token,
            **given,
        )

    # ---- what follows from the fields ----

    @property
    def num_experts(self) -> int:
        """Of all ranks."""
        return self.world_size * self.num_experts_per_rank

    @property
    def recv_per_source(self) -> int:
        """Rows that one rank may send to one other in a call."""
        most = self.max_num_inp_token_per_rank
        if not self.max_total_recv_tokens:
            return most
        return min(-(-self.max_total_recv_tokens // self.world_size), most)

    @property
    def recv_capacity(self) -> int:
        """Rows of the tensors that dispatch returns."""
        return self.world_size * self.recv_per_source

    @property
    def position_stride(self) -> int:
        """Source positions and map entries are rank * this + token or row."""
        return self.world_size * self.max_num_inp_token_per_rank

    @property
    def null_position(self) -> int:
        """The map entry of a slot that goes nowhere: dropped, or a rank that an earlier slot has named."""
        return self.world_size * self.position_stride

    @property
    def row_bytes(self) -> int:
        return self.hidden_dim * self.max_token_type_size

    @property
    def scale_bytes(self) -> int:
        return self.scale_dim * self.scale_type_size

    # ---- checks ----

    def check(self) -> None:
        """Raise UnsupportedShape, with the value, for what no target could do."""
        for name, low in _WHOLE.items():
            _check_whole(name, getattr(self, name), low)
        self._check_kinds()
        if self.rank >= self.world_size:
            raise UnsupportedShape(f"rank={self.rank}: ranks are 0..{self.world_size - 1}")
        if self.num_experts_per_token > MAX_TOPK:
            raise UnsupportedShape(
                f"num_experts_per_token={self.num_experts_per_token}: at most {MAX_TOPK} slots per token"
            )
        if self.hidden_dim > MAX_HIDDEN:
            raise UnsupportedShape(f"hidden_dim={self.hidden_dim}: at most {MAX_HIDDEN}")
        if self.scale_dim and not self.scale_type_size:
            raise UnsupportedShape(f"scale_dim={self.scale_dim} with scale_type_size=0: bytes of one scale?")
        if self.quant_type not in QUANT_TYPES:
            raise UnsupportedShape(f"quant_type={self.quant_type!r}: one of {', '.join(QUANT_TYPES)}")
        if self.null_position >= 1 << 31:
            raise UnsupportedShape(
                f"{self.world_size} ranks of max_num_inp_token_per_rank={self.max_num_inp_token_per_rank} "
                f"need "
                f"map entries up to {self.null_position}, and they are int32: use fewer tokens per call"
            )

    def _check_kinds(self) -> None:
        """The fields that are no numbers. Flags and the kernel type may have come as numbers."""
        from mori_ep.arguments import check_dtype, check_flag

        check_dtype("data_type", self.data_type)
        for name in ("dispatch_dtype", "combine_dtype"):
            if getattr(self, name) is not None:
                check_dtype(name, getattr(self, name))
        self.use_external_inp_buf = check_flag("use_external_inp_buf", self.use_external_inp_buf)
        self.elastic = check_flag("elastic", self.elastic)
        kind: object = self.kernel_type
        if (
            not isinstance(kind, int)
            or isinstance(kind, bool)
            or kind not in list(EpDispatchCombineKernelType)
        ):
            kinds = ", ".join(kind.name for kind in EpDispatchCombineKernelType)
            raise UnsupportedShape(f"kernel_type={kind!r}: an EpDispatchCombineKernelType, one of {kinds}")
        self.kernel_type = EpDispatchCombineKernelType(kind)

    def compared(self) -> dict[str, object]:
        """The fields that must be equal on all ranks, as values that travel."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "rank"}


_WHOLE = {
    "rank": 0,
    "world_size": 1,
    "hidden_dim": 1,
    "scale_dim": 0,
    "scale_type_size": 0,
    "max_token_type_size": 1,
    "max_num_inp_token_per_rank": 1,
    "num_experts_per_rank": 1,
    "num_experts_per_token": 1,
    "warp_num_per_block": 1,
    "block_num": 1,
    "max_total_recv_tokens": 0,
    "gpu_per_node": 1,
    "rdma_block_num": 0,
    "num_qp_per_pe": 1,
}


def _check_whole(name: str, value: object, low: int) -> None:
    if type(value) is not int or value < low:
        raise UnsupportedShape(f"{name}={value!r}: a whole number of at least {low} is needed")


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, int | str) else str(value)
