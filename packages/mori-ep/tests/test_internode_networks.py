"""Nodes in network namespaces of their own, joined by veth pairs and a bridge: TCP between them, and no more.

Needs the right to make namespaces (root). Where that is missing, test_internode.py still runs the same calls
with all nodes on the loopback.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from mori_ep import (
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    EpDispatchCombineOp,
    internode,
    reference,
)
from mori_shmem.errors import PeerError, PeerTimeout
from mori_shmem.launch import run_ranks, run_ranks_to_the_end

TOPK, HIDDEN, MAX_TOKENS = 4, 256, 150
NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
    reason="nixl is not installed: mori-ep[internode]",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@dataclass
class Network:
    """One namespace per node, each with an interface eth0 at 10.77.0.(node + 1)."""

    names: list[str]

    def enter(self, node: int) -> None:
        """Move this process (one thread, so far) to the namespace of a node."""
        namespace = os.open(f"/run/netns/{self.names[node]}", os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), "setns")
        os.close(namespace)

    def cut(self, node: int) -> None:
        ip("-n", self.names[node], "link", "set", "eth0", "down")

    def join(self, engine: str, ranks_per_node: int, timeout_s: float) -> internode.NodesCommunicator:
        """In a rank of run_ranks: into its namespace, then to the others."""
        from torch.distributed import TCPStore

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.enter(rank // ranks_per_node)
        store = TCPStore("10.77.0.1", 29500, world, rank == 0, timedelta(seconds=20))
        return internode.join(
            rank=rank,
            world_size=world,
            store=store,
            ranks_per_node=ranks_per_node,
            engine=engine,
            interface="eth0",
            timeout_s=timeout_s,
        )


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """As many nodes as the test says."""
    names = [f"mori-{os.getpid()}-{node}" for node in range(request.param)]
    hub = f"mori-{os.getpid()}-hub"
    made = []
    try:
        try:
            for name in [hub, *names]:
                ip("netns", "add", name)
                made.append(name)
            ip("-n", hub, "link", "add", "br0", "type", "bridge")
            ip("-n", hub, "link", "set", "br0", "up")
            for node, name in enumerate(names):
                ip(
                    "link",
                    "add",
                    "eth0",
                    "netns",
                    name,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"to{node}",
                    "netns",
                    hub,
                )
                ip("-n", hub, "link", "set", f"to{node}", "master", "br0", "up")
                ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "eth0", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(
                f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}".strip()
            )
        yield Network(names)
    finally:
        for name in made:
            ip("netns", "del", name)


def brought(rank: int, call: int, world: int) -> reference.RankInput:
    """Rows of whole numbers: sums are exact, whatever the grouping."""
    generator = torch.Generator().manual_seed(rank * 1000 + call)
    n = (rank * 61 + call * 37) % (MAX_TOKENS + 1)
    x = torch.randint(-4, 5, (n, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(n, 4 * world, generator=generator).argsort(1)[:, :TOPK].int()
    weights = torch.randint(1, 4, (n, TOPK), generator=generator).float()
    return reference.RankInput(x, ids, weights)


def op_for(comm: internode.NodesCommunicator) -> EpDispatchCombineOp:
    config = EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=4 * comm.world_size,
        data_type=torch.bfloat16,
        hidden_dim=HIDDEN,
        max_num_inp_token_per_rank=MAX_TOKENS,
        num_experts_per_token=TOPK,
        kernel_type=EpDispatchCombineKernelType.InterNode,
        gpu_per_node=comm.ranks_per_node,
    )
    return EpDispatchCombineOp(config, comm)


def pair(op: EpDispatchCombineOp, call: int) -> None:
    """A dispatch and a combine, held to the reference."""
    me, world = op.config.rank, op.config.world_size
    given = [brought(rank, call, world) for rank in range(world)]
    want = reference.dispatch(given, 4)
    rows, weights, _, _, count = op.dispatch(given[me].x, given[me].weights, None, given[me].ids)
    n = want[me].count
    assert int(count) == n
    assert torch.equal(rows[:n], want[me].rows)
    assert torch.equal(weights[:n], want[me].weights)
    out, _ = op.combine(rows, None, given[me].ids)
    sums = reference.combine(given, want, [received.rows for received in want], 4)
    assert torch.equal(out[: len(given[me].ids)], sums[me])


@pytest.mark.parametrize(
    ("engine", "network", "per_node"),
    [
        ("gloo", 2, 2),
        ("gloo", 3, 1),
        pytest.param("nixl", 2, 4, marks=NIXL),
        pytest.param("nixl", 3, 1, marks=NIXL),
    ],
    indirect=["network"],
)
def test_nodes_in_namespaces_of_their_own(network: Network, per_node: int, engine: str) -> None:
    def calls() -> None:
        with network.join(engine, per_node, timeout_s=60) as comm, op_for(comm) as op:
            assert comm.between_namespaces
            for call in range(4):
                pair(op, call)
            comm.barrier()

    run_ranks(calls, per_node * len(network.names), timeout_s=120)


@pytest.mark.parametrize(
    ("engine", "network"),
    [("gloo", 2), pytest.param("nixl", 3, marks=NIXL)],
    indirect=["network"],
)
def test_a_cut_link_is_an_error_within_the_deadline(network: Network, engine: str) -> None:
    deadline_s = 3.0

    def calls() -> tuple[float, str, str]:
        with network.join(engine, 2, timeout_s=deadline_s) as comm:
            op = op_for(comm)
            pair(op, 0)
            began_s = time.monotonic()
            try:
                comm.barrier()  # where ranks of the cut node may still be
                if comm.rank == 0:
                    network.cut(1)
                for call in range(1, 50):
                    pair(op, call)
            except PeerError as error:
                return time.monotonic() - began_s, type(error).__name__, str(error)
        return -1.0, "", ""

    outcomes = run_ranks_to_the_end(calls, 2 * len(network.names), timeout_s=60)
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    for took_s, kind, text in (outcome.value for outcome in outcomes):
        assert kind, "a rank went on without its peers"
        assert took_s < deadline_s + 3
        assert "rank" in text
    assert any(kind == PeerTimeout.__name__ for _, kind, _ in (o.value for o in outcomes))
