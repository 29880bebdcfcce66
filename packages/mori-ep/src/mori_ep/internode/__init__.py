"""Across nodes: the ranks of a node share memory, an existing engine carries bytes between nodes.

    from mori_ep import internode
    comm = internode.join(ranks_per_node=8)                     # engine "nixl", or by name "gloo"
    config = EpDispatchCombineConfig.for_comm(comm, kernel_type=EpDispatchCombineKernelType.InterNodeV1,
                                              gpu_per_node=8, ...)
    op = EpDispatchCombineOp(config, comm)

A rank talks to its counterparts only: the ranks with its own local number on other nodes. A token that
experts of another node want crosses once, to the counterpart there, which stores it at its node's ranks; on
the way back the counterpart adds up what its node has made of the token and sends one row. Rows, their order
and the maps are those of the kernel types inside a node; sums are rounded once per node and once at the end.

Read on: target.py (the protocol), engine.py (what carries), comm.py (who is where), paper.py (the sums).
"""

from mori_ep.internode.comm import NodesCommunicator, NodesWindow, join
from mori_ep.internode.engine import ENGINES, Engine

__all__ = ["ENGINES", "Engine", "NodesCommunicator", "NodesWindow", "join"]
