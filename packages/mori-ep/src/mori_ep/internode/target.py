"""Dispatch and combine across nodes: InterNodeV1 (rows compact), InterNodeV1LL (runs of tokens as they are),
and InterNode, which takes the second where a tuned rule says so; without one, for calls of up to
MORI_EP_INTERNODE_LL_TOKENS tokens on a rank.

The counterpart of rank (node n, local l) on node m is (m, l). "In the node": by load and store, with the
flags of targets/host/launch.py. "Put": by the engine, with a word that is set when the bytes are there
(layout.py).

Dispatch e on rank r
  1. maps: for every (token, slot) of r the rank of this node, the node, and the rows per rank of all nodes
  2. r's header to headers[e & 1][r] of its node's ranks; put to its counterparts, with the rows of each chunk
  3. for every other node, every chunk of 64 tokens that has rows for it: the rows, packed (compact: those
     that go there; else the whole run), in one put with one word. Here ends the half that waits for nobody
  4. wait for the counterparts' headers, store each at the node's ranks; entered[r] = e in the node; wait for
     entered >= e. Now all know the counts of all ranks, and where everybody's rows start in this node
  5. r's own rows for this node to their place in out*; then each chunk of each counterpart as it arrives: its
     tokens' ids say where it goes in this node. r keeps that map for combine
  6. arrived[r] = e in the node; wait for arrived >= e, then for finished >= (combines that r has done)
  7. wait until r's puts are done

Combine c on rank r
  1. y = the rows to be added, as they travel (formats.py: a transport may quantise them); staged[r] = c in
     the node. Here ends the half that waits for nobody
  2. wait for staged >= c. For every chunk that came in 5: add up the rows of each token in the node's y,
     round, quantise, put them back to the counterpart in one put with one word. After the last, the word
     `combined` = c, with the kind of rows, to every counterpart, also if there was no chunk
  3. own_partial = the same for r's own tokens; finished[r] = c in the node
  4. wait for `combined` of every counterpart and the words of the chunks that r had sent
  5. result = for every token the sum of its nodes' partial rows, in the order of the first slots that name
     the nodes, added in fp32 and rounded once; wait until r's puts are done, and for finished >= c in the
     node once y has been lent to the caller

Who may overwrite what (what is in the node: as in targets/host/launch.py)
  headers_from, rows_from    Parity e & 1, put by a counterpart s in its dispatch e. s has had r's header of
                             e - 1, and r sent that after it was done with dispatch e - 2.
  partials_from              Parity c & 1, likewise by `combined`, which every combine sends and awaits.
  *_out                      By r itself after 7, or 5 of combine: its puts are done.
Words have one writer and only grow. Whoever waits makes the engine progress.
"""

from __future__ import annotations

from typing import Any

import torch
from mori_shmem.device.rows import count_ids
from mori_shmem.errors import UnsupportedShape
from mori_shmem.settings import Snapshot

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.internode.combine import InterCombiner
from mori_ep.internode.comm import NodesCommunicator, NodesWindow
from mori_ep.internode.dispatch import InterDispatcher, replayed
from mori_ep.internode.engine import Waits
from mori_ep.internode.flags import NodeFlags
from mori_ep.internode.layout import InterLayout, layout_for
from mori_ep.internode.routes import handle_of
from mori_ep.plan import NOTHING_SAID, FewTokens, Plan, Way
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.settings import FP8_COMBINE_SCALE_DIM, INTERNODE_LL_TOKENS
from mori_ep.targets import CombineCall
from mori_ep.targets.host.experts import ExpertRows
from mori_ep.targets.host.launch import Runner as NodeRunner
from mori_ep.targets.host.marks import Marks

__all__ = ["Runner", "layout_for", "plan_for", "why_not"]


def plan_for(config: EpDispatchCombineConfig, few: FewTokens = NOTHING_SAID) -> Plan:
    """What happens in a node: rows go where counts say, sums are pulled. Few tokens need no memory of their
    own."""
    return Plan(Way.COUNTS, Way.PULL)


def why_not(config: EpDispatchCombineConfig, dispatch: torch.dtype, combine: torch.dtype) -> str | None:
    """The reason why such an op cannot be run across nodes, or None."""
    if not config.kernel_type.across_nodes:
        return (
            f"{config.kernel_type.name} reaches the ranks of one node, this communicator joins nodes: "
            "InterNode, InterNodeV1 or InterNodeV1LL"
        )
    if config.world_size % config.gpu_per_node:
        return f"gpu_per_node={config.gpu_per_node} does not divide world_size={config.world_size}"
    if config.elastic:
        return "elastic=True goes with kernel types of one node"
    if config.quant_type == "fp4_blockwise":
        return "fp4_blockwise goes with IntraNode and IntraNodeLL"
    if config.quant_type != "none" and not config.use_external_inp_buf:
        return "a quantised transport makes its own rows: use_external_inp_buf=False would be ignored"
    return None


class Runner(NodeRunner):
    """One op's flags, buffers and maps on this rank; see mori_ep.targets.Runner."""

    def __init__(
        self,
        comm: NodesCommunicator,
        window: NodesWindow,
        layout: InterLayout,
        config: EpDispatchCombineConfig,
        plan: Plan,
        values: Snapshot,
    ) -> None:
        _check_place(comm, config)
        here = window.here
        parts: Any = layout
        self._window, self._layout, self._config = here, parts, config
        self._memory = here.tensor(here.nbytes, torch.uint8)  # keeps what addresses point to mapped
        self._waits = Waits(comm, here, window.engine)
        self._marks = Marks()
        self._experts: ExpertRows | None = None
        self._comm = comm
        flags = NodeFlags(comm.node, here, layout, self._waits)
        shared = (comm, window, layout, config, flags, self._waits, self._marks)
        dispatcher: Any = InterDispatcher(*shared, values[INTERNODE_LL_TOKENS])
        combiner: Any = InterCombiner(*shared, values[FP8_COMBINE_SCALE_DIM])
        self._flags, self._dispatcher, self._combiner = flags, dispatcher, combiner

    def routing(self) -> EpDispatchRoutingHandle:
        positions = self.view("out_positions", (self._config.recv_capacity,), torch.int32)
        return handle_of(self._config, self._dispatcher.routes, positions)  # type: ignore[arg-type]

    def count_experts(self, counts: torch.Tensor) -> None:
        config = self._config
        ids = (
            self._window.addresses[self._comm.local_rank] + self._layout.regions()["out_indices"].offset_bytes
        )
        slots = self.received_rows() * config.num_experts_per_token
        first = config.rank * config.num_experts_per_rank
        count_ids(ids, slots, first, config.num_experts_per_rank, counts.data_ptr())

    def combine_send(self, launch: Any, call: CombineCall) -> None:
        routes: Any = replayed(call.routing) or self._dispatcher.routes
        self._combiner.send(launch, call, routes)


def _check_place(comm: NodesCommunicator, config: EpDispatchCombineConfig) -> None:
    if config.gpu_per_node != comm.ranks_per_node:
        raise UnsupportedShape(
            f"gpu_per_node={config.gpu_per_node}, but the communicator was joined with "
            f"ranks_per_node={comm.ranks_per_node}: they must be equal"
        )
