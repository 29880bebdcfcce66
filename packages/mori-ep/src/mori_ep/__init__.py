"""Expert-parallel dispatch and combine: every rank sends its tokens to the ranks that hold their experts, and
gets the sum of what the experts made of them.

    import mori_shmem
    from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp

    comm = mori_shmem.init()
    op = EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, hidden_dim=7168, num_experts=256, ...),
    comm) rows, weights, scales, ids, count = op.dispatch(x, weights, None, expert_ids)
    out, _ = op.combine(experts(rows), None, expert_ids)

Importing the package imports no torch and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mori_ep import settings

if TYPE_CHECKING:
    from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
    from mori_ep.op import EpDispatchCombineOp
    from mori_ep.routing import EpDispatchRoutingHandle

_HOMES = {
    "EpDispatchCombineConfig": "config",
    "EpDispatchCombineKernelType": "config",
    "EpDispatchCombineOp": "op",
    "EpDispatchRoutingHandle": "routing",
}

__all__ = [
    "EpDispatchCombineConfig",
    "EpDispatchCombineKernelType",
    "EpDispatchCombineOp",
    "EpDispatchRoutingHandle",
    "settings",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mori_ep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mori_ep.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
