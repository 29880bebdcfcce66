"""What rules change in the cuda target's launches, on the sources compiled for the CPU: grids and ways, not
results."""

from __future__ import annotations

import pytest
from cuda_node import BF16, CPU_BLOCKS, CPU_PACKET_TOKENS, Node, OnCpu, make_inputs, rounds, run_dispatches
from mori_ep import tunable
from mori_ep.grids import MOST_THREADS
from mori_ep.keys import geometry_of
from mori_ep.plan import FewTokens, Geometry
from mori_ep.targets.cuda import limits
from mori_ep.tunable import TUNABLE
from mori_tune import Candidate, Device, Problem

pytestmark = pytest.mark.timeout(240)

GEOMETRIES = [Geometry(2, -1, 1, 1), Geometry(3, -1, 5, 0), Geometry(2, -1, 16, 1), Geometry(9, -1, 10, 0)]


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("registered", [False, True])
def test_TU_5_any_geometry_and_either_way_give_the_same_rows_and_sums(
    device: str, registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank and phase launched in its own way: packets where the target would not send them by itself (it
    would up to 2 tokens, rules have up to 40), rows where it would not, from 1 to 16 warps."""
    row = 2 * 512
    monkeypatch.setattr(limits, "DISPATCH_PACKET_BYTES", 2 * 2 * row)
    monkeypatch.setattr(limits, "COMBINE_PACKET_BYTES", {True: 2 * 2 * row, False: 2 * 2 * row})
    few = FewTokens(-1, CPU_PACKET_TOKENS, CPU_PACKET_TOKENS)
    node = Node(
        device,
        3,
        few=few,
        max_num_inp_token_per_rank=60 * 10,
        num_experts_per_token=6,
        use_external_inp_buf=not registered,
    )
    assert node.config.max_num_inp_token_per_rank == 60
    draws = [[40, 40, 40], [2, 60, 33], [0, 40, 1]]
    calls = [make_inputs(node, n, i) for i, n in enumerate(draws)]
    for turn in range(len(GEOMETRIES)):
        shift = {"dispatch": turn, "combine": 2 * turn + 1}
        node.asked = lambda phase, rank, s=shift: GEOMETRIES[(s[phase] + rank) % len(GEOMETRIES)]
        OnCpu.launched.clear()
        rounds(node, calls, BF16, 512, registered=registered, weights=turn % 2 == 1)
        for kernel, blocks, threads in OnCpu.launched:
            assert 2 <= blocks <= CPU_BLOCKS, "no more than are resident together"
            assert threads % 32 == 0
            assert threads <= MOST_THREADS[kernel]
        assert {kernel for kernel, *_ in OnCpu.launched} == set(MOST_THREADS)
    node.asked = lambda phase, rank: GEOMETRIES[rank]
    run_dispatches(node, calls)


def launched_for(node: Node, tokens: int, by_phase: dict[str, Geometry]) -> dict[str, tuple[str, int, int]]:
    """What rank 0 launches, by phase."""
    node.asked = lambda phase, rank: by_phase[phase]
    given = make_inputs(node, [tokens] * node.world, 1)
    OnCpu.launched.clear()
    rounds(node, [given], BF16, 512)
    return {"dispatch": OnCpu.launched[0], "combine": OnCpu.launched[node.world]}


@pytest.mark.parametrize("device", ["cpu"])
def test_a_candidate_is_launched_as_the_tuner_counts_it(device: str) -> None:
    """The tuner leaves out what launches the same, and saves no more warps than a kernel uses: by the numbers
    of the launch itself. A rule of it launches what the winner launched."""
    node = Node(device, 2, few=FewTokens(-1, 40, 40), max_num_inp_token_per_rank=40)
    values = {"tokens": 40, "hidden": 512, "topk": 4, "scale_dim": 0, "kernel_type": "IntraNode"}
    problem = Problem({**values, "dtype": "bf16", "combine_dtype": "bf16", "quant_type": "none"})
    here = Device("cuda", "sm_90", "h200", CPU_BLOCKS)
    for way in ("yes", "no"):
        for warps in (1, 4, 12, 16):
            chosen = {"block_num": 2, "rdma_block_num": 0, "warp_per_block": warps, "low_latency": way}
            asked = geometry_of(chosen, "chosen")
            launched = launched_for(node, 40, dict.fromkeys(tunable.PHASES, asked))
            counted = tunable.grids_of(problem, chosen, CPU_BLOCKS)
            for phase, grid in zip(tunable.PHASES, counted, strict=True):
                assert launched[phase] == (grid.kernel, grid.blocks, grid.threads), (phase, way, warps)
                saved = TUNABLE.saved_as(problem, phase, Candidate.of(chosen), here).as_dict()
                again = tunable.grids_of(problem, saved, CPU_BLOCKS)[tunable.PHASES.index(phase)]
                assert again == grid
                pulled = grid.kernel == "combine_pull"
                assert saved["warp_per_block"] == (8 if pulled and warps > 8 else saved["warp_per_block"])
                assert saved["warp_per_block"] <= warps
