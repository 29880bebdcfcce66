"""What engines call, on top of EpDispatchCombineOp. Each module is imported in the place of the library it
stands for:

    from mori_ep.adapters import deepep as deep_ep     # deep_ep.Buffer
    from mori_ep.adapters import sglang as mori        # mori.ops, mori.shmem
    from mori_ep.adapters import vllm as mori

An option that cannot be honoured is refused by name; docs/adapters.md lists what differs.
"""
