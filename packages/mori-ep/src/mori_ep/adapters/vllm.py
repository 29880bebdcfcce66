"""For vLLM's all-to-all managers: `from mori_ep.adapters import vllm as mori`, or its names for deep_ep.

Its mori manager registers the group as "mori", calls shmem_torch_process_group_init and makes one op for each
set of arguments; prepare calls op.dispatch(x, weights, scales, ids) and takes tensors at full capacity with
the count, finalize copies op.combine(y, None, ids)[0][:n].
Its DeepEP managers use Buffer: get_dispatch_layout, dispatch, combine with one handle for each micro-batch;
low_latency_dispatch with a hook, low_latency_combine(out=...) with one or without.
"""

from mori_ep.adapters.deepep import Buffer, Config, EventOverlap
from mori_ep.adapters.engines import ops, shmem

__all__ = ["Buffer", "Config", "EventOverlap", "ops", "shmem"]
