"""The sums of internode/paper.py, which docs/internode.md quotes: the formulas against a simulation of the
routing, and the simulation against what an op really sends.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, internode
from mori_ep.internode.paper import OnPaper, Sent, count, window_bytes, window_size
from mori_ep.problem import RowFormat
from mori_shmem.launch import run_ranks

PAGE = Path(__file__).parents[3] / "docs" / "internode.md"


def big(tokens: int, *, compact: bool = True) -> OnPaper:
    """64 nodes of 8 ranks, fp8 rows of 7168 with scales, top-8 of 512 experts, bf16 back."""
    row = RowFormat(7168, 224, 8, weights=True)
    return OnPaper(64, 8, 512, 8, tokens, row, 2 * 7168, compact)


def uniform_routing(job: OnPaper) -> torch.Tensor:
    """[ranks, tokens, topk]: different experts, each set equally likely."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.rand(job.num_ranks, job.tokens, job.num_experts, generator=generator)
    return draws.topk(job.topk, dim=2).indices


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("tokens", [8, 100])
def test_the_formulas_are_the_mean_of_the_simulation(tokens: int, compact: bool) -> None:
    job = big(tokens, compact=compact)
    found = count(job, uniform_routing(job), 128)
    for on_paper, index in ((job.dispatch(128), 0), (job.combine(), 1)):
        for field in ("messages", "bytes", "rows"):
            mean = sum(getattr(sent[index], field) for sent in found) / job.num_ranks
            assert getattr(on_paper, field) == pytest.approx(mean, rel=0.01)


def test_rows_that_are_forwarded_and_rows_without_sharing() -> None:
    job = big(64)
    ids = uniform_routing(job)
    own = torch.arange(job.num_ranks)[:, None, None]
    ranks = ids // (job.num_experts // job.num_ranks)
    remote = torch.zeros(job.num_ranks, 64, job.num_ranks, dtype=torch.bool).scatter_(2, ranks, True)
    node = torch.arange(job.num_ranks) // job.ranks_per_node
    remote &= node[None, None, :] != node[own]
    mean = float(remote.sum()) / job.num_ranks
    assert job.remote_ranks * 64 == pytest.approx(mean, rel=0.01)
    assert job.forwarded_rows == pytest.approx(mean, rel=0.01)  # all of them pass through one counterpart


@pytest.mark.parametrize("kind", ["InterNodeV1", "InterNodeV1LL"])
def test_an_op_sends_what_the_simulation_counts(kind: str) -> None:
    nodes, per_node, topk, tokens, hidden = 3, 1, 2, 100, 64

    def calls() -> None:
        row = RowFormat(2 * hidden, 0, topk, weights=True)
        compact = kind == "InterNodeV1"
        job = OnPaper(nodes, per_node, 6 * nodes, topk, tokens, row, 2 * hidden, compact)
        with internode.join(engine="gloo", ranks_per_node=per_node) as comm:
            config = EpDispatchCombineConfig.for_comm(
                comm,
                num_experts=job.num_experts,
                data_type=torch.bfloat16,
                hidden_dim=hidden,
                max_num_inp_token_per_rank=tokens,
                num_experts_per_token=topk,
                kernel_type=EpDispatchCombineKernelType[kind],
                gpu_per_node=per_node,
            )
            with EpDispatchCombineOp(config, comm) as op:
                ids = uniform_routing(job)
                ids[:, 70:, :] = ids[:, :1, :]  # a last chunk in which all tokens go to the same nodes
                sent: list[int] = []
                spy_on(op._window.engine, sent)
                mine = ids[comm.rank].int().contiguous()
                x, weights = torch.ones(tokens, hidden).bfloat16(), torch.ones(tokens, topk)
                rows, *_ = op.dispatch(x, weights, None, mine)
                dispatch, _ = count(job, ids, tokens)[comm.rank]
                assert (len(sent), sum(sent)) == (dispatch.messages, dispatch.bytes)
                sent.clear()
                op.combine(rows, None, mine)
                _, combine = count(job, ids, tokens)[comm.rank]
                assert (len(sent), sum(sent)) == (combine.messages, combine.bytes)

    run_ranks(calls, nodes * per_node, timeout_s=60)


def spy_on(engine: object, sent: list[int]) -> None:
    put: Callable[..., None] = engine.put_signal

    def noted(node: int, to: int, source: int, nbytes: int, word: int, value: int) -> None:
        sent.append(nbytes)
        put(node, to, source, nbytes, word, value)

    engine.put_signal = noted


def big_config(max_tokens: int, **more: int) -> EpDispatchCombineConfig:
    return EpDispatchCombineConfig(
        data_type=torch.float8_e4m3fn,
        rank=0,
        world_size=512,
        hidden_dim=7168,
        scale_dim=56,
        scale_type_size=4,
        max_token_type_size=2,
        max_num_inp_token_per_rank=max_tokens,
        num_experts_per_rank=1,
        num_experts_per_token=8,
        kernel_type=EpDispatchCombineKernelType.InterNodeV1,
        gpu_per_node=8,
        **more,
    )


@pytest.mark.parametrize("max_tokens", [8, 128, 4096])
def test_window_formulas_are_the_layout(max_tokens: int) -> None:
    config = big_config(max_tokens)
    named = window_bytes(config)
    flags_and_headers = 16 * 512 * (6 + 512) + 8 * 3 * 63 * (6 + 512 + 1 + max_tokens // 64 + 1) + 8 * 5 * 512
    assert sum(named.values()) <= window_size(config) < sum(named.values()) * 1.02 + flags_and_headers


def figures_of_the_page() -> list[tuple[int, bool, Sent, Sent]]:
    """Rows of the table: tokens, compact, dispatch and combine of one rank."""
    return [
        (
            tokens,
            compact,
            big(tokens, compact=compact).dispatch(tokens),
            big(tokens, compact=compact).combine(),
        )
        for tokens in (8, 128, 4096)
        for compact in (True, False)
    ]


def line(tokens: int, compact: bool, dispatch: Sent, combine: Sent) -> str:
    kind = "V1" if compact else "V1LL"
    sent = " | ".join(f"{call.messages:.0f} | {call.bytes / 1e6:.2f}" for call in (dispatch, combine))
    return f"| {tokens} | {kind} | {sent} |"


def test_the_page_quotes_these_figures() -> None:
    page = PAGE.read_text()
    for figures in figures_of_the_page():
        assert line(*figures) in page
    for max_tokens in (8, 128, 4096):
        for most, config in (("W x M", big_config(max_tokens)), ("16 M", capped(max_tokens))):
            shown = f"| {max_tokens} | {most} | {window_size(config) / 1e9:.2f} |"
            assert shown in page, shown
    job = big(128)
    quoted = [float(number) for number in re.findall(r"=\s+\*\*([\d.]+)\*\*", page)]
    assert quoted == [round(job.p_node, 4), round(job.remote_nodes, 2), round(job.remote_ranks, 2)]


def capped(max_tokens: int) -> EpDispatchCombineConfig:
    """Room for 16 M rows: each source may send a rank at most M / 32 of its tokens."""
    return big_config(max_tokens, max_total_recv_tokens=16 * max_tokens)
