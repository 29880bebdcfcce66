"""What serving engines find under `mori`: `ops` and `shmem`.

An engine registers a process group under a name, calls shmem.shmem_torch_process_group_init(name), and from
then on makes ops from a configuration alone: they use that group.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import mori_shmem
import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, MoriError

from mori_ep import checks
from mori_ep.arguments import check_flag
from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.op import EpDispatchCombineOp
from mori_ep.routing import EpDispatchRoutingHandle

_numbers = itertools.count(1)
_group: Any = None  # that ops are made for
_comm: mori_shmem.Communicator | None = None


def shmem_torch_process_group_init(group_name: str) -> int:
    """Ranks of the process group that was registered under this name. Collective. 0, as status."""
    global _group, _comm
    from torch._C._distributed_c10d import _resolve_process_group

    if not isinstance(group_name, str):
        raise ArgumentError(f"group_name is {described(group_name)}: the name of a process group is needed")
    try:
        found = _resolve_process_group(group_name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"no process group is registered under group_name={group_name!r} ({str(error).splitlines()[0]}): "
            "it is needed first, from torch._C._distributed_c10d._register_process_group"
        ) from None
    shmem_finalize()
    _group = found
    return 0


def shmem_finalize() -> int:
    """Forget the group, and close the communicator of the ops in one node."""
    global _group, _comm
    if _comm is not None:
        _comm.close()
    _group = _comm = None
    return 0


def shmem_mype() -> int:
    return int(_here().rank())


def shmem_npes() -> int:
    return int(_here().size())


def _here() -> Any:
    if _group is None:
        raise MoriError(
            "no process group is registered here: call shmem_torch_process_group_init(name) first"
        )
    return _group


def _communicator(config: EpDispatchCombineConfig) -> Any:
    """One for all ops in a node; ops across nodes bring their own."""
    global _comm
    if config.kernel_type.across_nodes:
        from mori_ep import internode

        return internode.join(
            group=_here(),
            backend="auto",
            ranks_per_node=config.gpu_per_node,
            name=f"mori-ep/engine/{next(_numbers)}",
        )
    if _comm is None:
        _comm = mori_shmem.init(group=_here(), name=f"mori-ep/engine/{next(_numbers)}")
    return _comm


class EngineOp(EpDispatchCombineOp):
    """An op as engines make it and call it."""

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        checks.check_made_of(config, None)
        config.check()
        comm = None if _group is None else _communicator(config)
        own = comm if config.kernel_type.across_nodes else None
        try:
            super().__init__(config, comm)
        except BaseException:
            if own is not None:
                own.close()
            raise
        self._owned = self._owned or own

    def dispatch_send(
        self,
        input: torch.Tensor,
        weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        indices: torch.Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
    ) -> Any:
        """Engines that may call this or dispatch pass both the same arguments. What is counted is only known
        to the other half: it counts if either is told to."""
        self._count_wanted = check_flag("call_local_expert_count", call_local_expert_count)
        return super().dispatch_send(
            input, weights, scales, indices, block_num, rdma_block_num, warp_per_block
        )

    def dispatch_recv(
        self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False
    ) -> None:
        super().dispatch_recv(block_num, warp_per_block, call_local_expert_count or self._count_wanted)

    _count_wanted = False


ops = SimpleNamespace(
    EpDispatchCombineConfig=EpDispatchCombineConfig,
    EpDispatchCombineKernelType=EpDispatchCombineKernelType,
    EpDispatchCombineOp=EngineOp,
    EpDispatchRoutingHandle=EpDispatchRoutingHandle,
)
shmem = SimpleNamespace(
    shmem_torch_process_group_init=shmem_torch_process_group_init,
    shmem_finalize=shmem_finalize,
    shmem_mype=shmem_mype,
    shmem_npes=shmem_npes,
)
