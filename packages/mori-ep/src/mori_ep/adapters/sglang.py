"""For SGLang's dispatchers: `from mori_ep.adapters import sglang as mori`, or its names for deep_ep.

The normal dispatcher calls op.dispatch(x, weights, scales, ids, call_local_expert_count=...) and
op.combine(y, None, ids)[0]; with copy engines, and in low latency, the send and recv halves, where combine's
result is taken from the send. It keeps only those fields of the configuration that ours has.
The DeepEP dispatcher uses Buffer and Config: get_dispatch_layout, dispatch and combine with expert_alignment,
low_latency_dispatch and low_latency_combine with a hook, clean_low_latency_buffer between the modes.
"""

from mori_ep.adapters.deepep import Buffer, Config
from mori_ep.adapters.engines import ops, shmem

__all__ = ["Buffer", "Config", "ops", "shmem"]
