"""The kernels in graphs, all ranks on one GPU (on_cpu/cuda_node.py)."""

from __future__ import annotations

import pytest
import torch
from cuda_node import BF16, Node, make_inputs, only_gpu

pytestmark = pytest.mark.timeout(240)


@only_gpu
def test_EP_6_a_captured_pair_of_calls_replayed_a_thousand_times_between_eager_calls(device: str) -> None:
    """All ranks' kernels in one graph, an odd number of pairs in it; every replay has fresh inputs."""
    node = Node(device, 2, max_num_inp_token_per_rank=128)
    tokens, mismatches = [128, 37], torch.zeros(1, dtype=torch.long, device=node.device)
    static = make_inputs(node, tokens, 0)

    def pair() -> None:
        node.dispatch(static)
        y = [rank.view("out", (node.config.recv_capacity, 512), BF16) for rank in node.ranks]
        node.combine(y, None, tokens)

    def compare() -> None:
        for rank, given in zip(node.ranks, static, strict=True):
            owners = torch.where(given.ids >= 0, given.ids // node.config.num_experts_per_rank, 2)
            ranks = (owners == 0).any(1).float() + (owners == 1).any(1).float()
            want = (given.x.float() * ranks[:, None]).to(BF16)
            out = rank.view("result", tuple(given.x.shape), BF16)
            mismatches.add_((out != want).any())

    pair()
    node.sync()
    graph, main = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=main):
        for rank in node.ranks:
            rank.stream.wait_stream(main)
        for _ in range(3):
            pair()
        for rank in node.ranks:
            main.wait_stream(rank.stream)
    draw = torch.Generator(device=node.device).manual_seed(5)
    for i in range(1000):
        for given in static:
            given.x.normal_(generator=draw)
            order = torch.rand(given.ids.shape[0], 16, device=node.device, generator=draw).argsort(1)
            given.ids.copy_(order[:, : given.ids.shape[1]])
        graph.replay()
        compare()
        if i % 10 == 3:
            node.sync()
            pair()
            node.sync()
            compare()
    node.sync()
    assert node.faults() == []
    assert int(mismatches) == 0
