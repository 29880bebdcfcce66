"""The call sequences of two serving engines, replayed on the host target.

Each fixture below is one exchange as the engine's own classes make it, written down by hand: which calls, in
which order, with which keywords, and what is kept from the results. A step is (name of the call, arguments,
what its result is called); "$name" stands for a value of an earlier step.
"""

from __future__ import annotations

import os
from dataclasses import fields
from types import ModuleType

import mori_shmem
import pytest
import torch
import torch.distributed as dist
from mori_ep import reference
from mori_ep.adapters import deepep, sglang, vllm
from mori_ep.adapters.deepep.quant import cast_rows
from mori_shmem.errors import MoriError

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
WORLD, EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 2, 16, 4, 512, 32
HERE = EXPERTS // WORLD

Step = tuple[str, dict[str, object], str]
RECORDED: dict[str, list[Step]] = {
    # SGLang's normal dispatcher on this op, without copy engines.
    "sglang normal": [
        (
            "dispatch",
            {"0": "$x", "1": "$weights", "2": "$scale", "3": "$ids", "call_local_expert_count": True},
            "rows came_weights came_scale came_ids count",
        ),
        ("combine", {"0": "$y", "1": None, "2": "$ids"}, "out _"),
    ],
    # The same with copy engines: both halves one after the other, the keyword goes to the send.
    "sglang normal, copy engines": [
        (
            "dispatch_send",
            {"0": "$x", "1": "$weights", "2": "$scale", "3": "$ids", "call_local_expert_count": True},
            "rows came_weights came_scale came_ids count",
        ),
        ("dispatch_recv", {}, ""),
        ("combine_send", {"0": "$y", "1": None, "2": "$ids"}, "out _"),
        ("combine_recv", {}, ""),
    ],
    # Its low-latency dispatcher: dispatch_a, dispatch_b, combine_a, combine_b.
    "sglang low latency": [
        (
            "dispatch_send",
            {"0": "$x", "1": "$weights", "2": "$scale", "3": "$ids"},
            "rows came_weights came_scale came_ids count",
        ),
        ("dispatch_recv", {"call_local_expert_count": True}, ""),
        ("combine_send", {"0": "$y", "1": None, "2": "$ids"}, "out _"),
        ("combine_recv", {}, ""),
    ],
    # vLLM's prepare and finalize on this op.
    "vllm": [
        (
            "dispatch",
            {"0": "$x", "1": "$weights", "2": "$scale", "3": "$ids"},
            "rows came_weights came_scale came_ids count",
        ),
        ("combine", {"0": "$y", "1": None, "2": "$ids"}, "out _"),
    ],
}
DEEPEP: dict[str, list[Step]] = {
    # vLLM's high-throughput manager: all by keyword, one handle kept for the micro-batch.
    "vllm normal": [
        (
            "get_dispatch_layout",
            {
                "topk_idx": "$ids",
                "num_experts": EXPERTS,
                "previous_event": None,
                "async_finish": False,
                "allocate_on_comm_stream": False,
            },
            "per_rank per_node per_expert in_rank event",
        ),
        (
            "dispatch",
            {
                "x": "$x",
                "handle": None,
                "num_tokens_per_rank": "$per_rank",
                "num_tokens_per_rdma_rank": "$per_node",
                "is_token_in_rank": "$in_rank",
                "num_tokens_per_expert": "$per_expert",
                "topk_idx": "$ids",
                "topk_weights": "$weights",
                "expert_alignment": 1,
                "config": None,
                "previous_event": None,
                "async_finish": True,
                "allocate_on_comm_stream": False,
            },
            "rows came_ids came_weights per_expert_list handle event",
        ),
        (
            "combine",
            {
                "x": "$y",
                "handle": "$handle",
                "topk_weights": None,
                "config": None,
                "previous_event": None,
                "async_finish": False,
                "allocate_on_comm_stream": False,
            },
            "out _ event",
        ),
    ],
    # SGLang's normal dispatcher on DeepEP, rows in blocks of 128 for grouped matrix products.
    "sglang normal": [
        (
            "get_dispatch_layout",
            {
                "0": "$ids",
                "1": EXPERTS,
                "previous_event": "$captured",
                "async_finish": True,
                "allocate_on_comm_stream": True,
            },
            "per_rank per_node per_expert in_rank event",
        ),
        (
            "dispatch",
            {
                "0": "$x",
                "topk_idx": "$ids",
                "topk_weights": "$weights",
                "num_tokens_per_rank": "$per_rank",
                "num_tokens_per_rdma_rank": "$per_node",
                "is_token_in_rank": "$in_rank",
                "num_tokens_per_expert": "$per_expert",
                "previous_event": "$event",
                "async_finish": True,
                "allocate_on_comm_stream": True,
                "expert_alignment": 128,
                "config": "$config",
            },
            "rows came_ids came_weights per_expert_list handle event",
        ),
        (
            "combine",
            {
                "0": "$y",
                "1": "$handle",
                "async_finish": True,
                "previous_event": "$captured",
                "allocate_on_comm_stream": True,
                "config": "$config",
            },
            "out _ event",
        ),
    ],
    # vLLM's low-latency manager: a hook for dispatch, none for combine, a tensor for the result.
    "vllm low latency": [
        (
            "low_latency_dispatch",
            {
                "0": "$x",
                "1": "$ids",
                "2": MAX_TOKENS,
                "3": EXPERTS,
                "use_fp8": False,
                "round_scale": False,
                "use_ue8m0": False,
                "async_finish": False,
                "return_recv_hook": True,
            },
            "rows count handle _ hook",
        ),
        ("$hook", {}, ""),
        (
            "low_latency_combine",
            {
                "0": "$y",
                "1": "$ids",
                "2": "$weights",
                "3": "$handle",
                "async_finish": False,
                "zero_copy": False,
                "return_recv_hook": False,
                "out": "$into",
            },
            "out _ _",
        ),
    ],
    # SGLang's low-latency dispatcher with hooks.
    "sglang low latency": [
        ("clean_low_latency_buffer", {"0": MAX_TOKENS, "1": HIDDEN, "2": EXPERTS}, ""),
        (
            "low_latency_dispatch",
            {
                "0": "$x",
                "1": "$ids",
                "2": MAX_TOKENS,
                "3": EXPERTS,
                "use_fp8": False,
                "async_finish": False,
                "return_recv_hook": True,
            },
            "rows count handle event hook",
        ),
        ("$hook", {}, ""),
        (
            "low_latency_combine",
            {
                "x": "$y",
                "topk_idx": "$ids",
                "topk_weights": "$weights",
                "handle": "$handle",
                "async_finish": False,
                "return_recv_hook": True,
            },
            "out event hook",
        ),
        ("$hook", {}, ""),
    ],
}


def rt(rank: int, tokens: int):
    """(x bf16, ids, weights) of one rank: a row names its origin, and sums are exact."""
    t, j, h = torch.arange(tokens)[:, None], torch.arange(TOPK)[None, :], torch.arange(HIDDEN)[None, :]
    x = ((t + 2 * h + 3 * rank) % 9 - 4).float()
    x[:, :2] = torch.cat([torch.full_like(t, rank), t], dim=1).float()
    return x.bfloat16(), (3 * t + 5 * j + 7 * rank) % EXPERTS, (1 + (t + j) % 2).float()


def play(target: object, steps: list[Step], values: dict[str, object], before: dict[str, object]) -> None:
    """Make the calls; `before[name]` is called before the step of that name: the layer's own work."""
    for name, arguments, results in steps:
        if name in before:
            before[name](values)
        filled = {k: values[v[1:]] if isinstance(v, str) and v[0] == "$" else v for k, v in arguments.items()}
        positional = [filled.pop(str(i)) for i in range(sum(k.isdigit() for k in filled))]
        call = values[name[1:]] if name[0] == "$" else getattr(target, name)
        result = call(*positional, **filled)
        if results:
            values.update(zip(results.split(), result, strict=True))


def engine_group() -> tuple[int, object]:
    """Torch's default group, as an engine has it, and one of its own for the experts."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.new_group(list(range(WORLD)))


def config_of(mori: object, rank: int, kind: object, dtype: torch.dtype, scale_dim: int):
    """As the engines make it: by keyword, without the fields that a version does not have."""
    wanted = {
        "rank": rank,
        "world_size": WORLD,
        "data_type": dtype,
        "hidden_dim": HIDDEN,
        "scale_dim": scale_dim,
        "scale_type_size": 4,
        "max_token_type_size": 2,
        "max_num_inp_token_per_rank": MAX_TOKENS,
        "num_experts_per_rank": HERE,
        "num_experts_per_token": TOPK,
        "warp_num_per_block": 16,
        "block_num": 80,
        "max_total_recv_tokens": 0,
        "use_external_inp_buf": True,
        "kernel_type": kind,
        "gpu_per_node": 1 if kind.across_nodes else WORLD,
        "rdma_block_num": 0,
        "num_qp_per_pe": 2,
        "quant_type": "none",
        "a_field_of_some_other_version": 1,
    }
    known = {f.name for f in fields(mori.ops.EpDispatchCombineConfig)}
    return mori.ops.EpDispatchCombineConfig(**{k: v for k, v in wanted.items() if k in known})


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("sequence", "engine", "kind"),
    [
        ("sglang normal", sglang, "IntraNode"),
        ("sglang normal, copy engines", sglang, "AsyncLL"),
        ("sglang low latency", sglang, "AsyncLL"),
        ("vllm", vllm, "IntraNode"),
        ("vllm", vllm, "InterNodeV1LL"),  # as with two nodes of one rank
    ],
)
def test_recorded_calls_on_the_op(sequence: str, engine: ModuleType, kind: str, fp8: bool):
    name = engine.__name__

    def calls():
        import importlib

        mori = importlib.import_module(name)
        os.environ["MORI_EP_INTERNODE_ENGINE"] = "gloo"
        rank, group = engine_group()
        torch._C._distributed_c10d._register_process_group("mori", group)
        mori.shmem.shmem_torch_process_group_init("mori")
        assert (mori.shmem.shmem_mype(), mori.shmem.shmem_npes()) == (rank, WORLD)
        kinds = mori.ops.EpDispatchCombineKernelType
        dtype, scale_dim = (torch.float8_e4m3fn, HIDDEN // 128) if fp8 else (torch.bfloat16, 0)
        op = mori.ops.EpDispatchCombineOp(config_of(mori, rank, kinds[kind], dtype, scale_dim))
        assert op.config.kernel_type is kinds[kind]
        for tokens in ([5, MAX_TOKENS], [0, 3], [MAX_TOKENS, 0]):
            everybody = [rt(r, n) for r, n in enumerate(tokens)]
            want = reference.dispatch(
                [reference.RankInput(x, ids.int(), w) for x, ids, w in everybody], HERE
            )[rank]
            x, ids, weights = everybody[rank]
            rows, scale = cast_rows(x, round_scale=False) if fp8 else (x, None)
            values = {"x": rows, "ids": ids.int(), "weights": weights, "scale": scale}

            def experts(values, want=want):
                """The layer between: it reads rows, ids and weights at full capacity, and the count."""
                n = int(values["count"])
                assert n == want.count
                assert torch.equal(values["came_ids"][:n], want.ids)
                assert torch.equal(values["came_weights"][:n], want.weights)
                sent, scales = cast_rows(want.rows, round_scale=False) if fp8 else (want.rows, None)
                assert torch.equal(values["rows"][:n].view(torch.uint8), sent.view(torch.uint8))
                if fp8:
                    assert torch.equal(values["came_scale"][:n], scales)
                local = (want.ids // HERE) == rank
                share = torch.where(local, want.weights, 0.0).sum(1, keepdim=True)
                y = torch.full((op.config.recv_capacity, HIDDEN), float("nan"), dtype=torch.bfloat16)
                y[:n] = (want.rows.float() * share).bfloat16()
                values["y"] = y
                numbers = torch.bincount(want.ids[local].long() - rank * HERE, minlength=HERE)
                if "sglang" in sequence:
                    assert torch.equal(op.local_expert_count.long(), numbers)

            play(op, RECORDED[sequence], values, {"combine": experts, "combine_send": experts})
            out = values["out"][: tokens[rank]]
            assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
        op.close()
        mori.shmem.shmem_finalize()
        with pytest.raises(MoriError, match="shmem_torch_process_group_init"):
            mori.shmem.shmem_mype()

    mori_shmem.run_ranks(calls, WORLD, timeout_s=100)


@pytest.mark.parametrize("sequence", list(DEEPEP))
def test_recorded_calls_on_the_buffer(sequence: str):
    low_latency = "low latency" in sequence

    def calls():
        rank, group = engine_group()
        hint = deepep.Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=MAX_TOKENS, hidden=HIDDEN, num_ranks=WORLD, num_experts=EXPERTS
        )
        config = deepep.Buffer.get_dispatch_config(WORLD)
        buffer = deepep.Buffer(
            group=group,
            num_nvl_bytes=config.get_nvl_buffer_size_hint(HIDDEN * 2, WORLD),
            num_rdma_bytes=hint if low_latency else 0,
            low_latency_mode=low_latency,
            num_qps_per_rank=HERE,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=True,
            explicitly_destroy=True,
        )
        for tokens in ([5, MAX_TOKENS], [0, 3], [MAX_TOKENS, 0]):
            x, ids, weights = rt(rank, tokens[rank])
            values = {
                "x": x,
                "ids": ids,
                "weights": weights,
                "into": torch.empty_like(x),
                "captured": deepep.Buffer.capture(),
                "config": config,
            }

            def weighted(values):
                """The engine's own sum over the experts of a row, before combine."""
                share = values["came_weights"].sum(1, keepdim=True)
                values["y"] = (values["rows"].float() * share).bfloat16()
                alignment = 128 if "sglang" in sequence else 1
                numbers = torch.bincount(values["came_ids"][values["came_ids"] >= 0], minlength=HERE)
                assert values["per_expert_list"] == [-(-n // alignment) * alignment for n in numbers.tolist()]

            def by_expert(values):
                values["y"] = values["rows"].clone()

            play(buffer, DEEPEP[sequence], values, {"combine": weighted, "low_latency_combine": by_expert})
            want = (x.float() * weights.sum(1, keepdim=True)).bfloat16()
            assert torch.equal(values["out"], want)
            if sequence == "vllm low latency":
                assert values["out"] is values["into"]
        buffer.destroy()

    mori_shmem.run_ranks(calls, WORLD, timeout_s=100)
