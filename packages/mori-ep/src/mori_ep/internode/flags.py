"""The flags of an op among the ranks of one node, whose waits keep the engine going."""

from __future__ import annotations

from typing import Any

import mori_shmem

from mori_ep.internode.engine import Waits
from mori_ep.internode.layout import InterLayout
from mori_ep.layout import CALL_SHIFT
from mori_ep.targets.host.flags import Flags


class NodeFlags(Flags):
    """As in one node: set at all ranks of the node, awaited from all."""

    def __init__(
        self, comm: mori_shmem.Communicator, window: mori_shmem.Window, layout: InterLayout, waits: Waits
    ) -> None:
        of_node: Any = layout  # has the same functions, for the regions of the node's part
        super().__init__(comm, window, of_node, elastic=False)
        self._waits = waits

    def wait(self, name: str, call: int, of: str) -> None:
        self._waits.for_node(self._awaited[name], call << CALL_SHIFT, f"`{name}` of {of} {call}")
