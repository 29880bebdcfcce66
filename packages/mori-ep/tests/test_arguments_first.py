"""What comes before there is an op: configurations, what ops and engines are made of, the bench's options.
Every kind of wrong argument is refused on this rank alone, by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp, internode
from mori_ep.adapters import engines
from mori_ep.adapters.deepep import Config
from mori_ep.bench.__main__ import main as bench_main
from mori_ep.plan import PLANNED
from mori_shmem.errors import MoriError
from wrong_arguments import Entry, Flag, Other, Whole, refused, told

_LOWEST = {
    **dict.fromkeys(("rank", "scale_dim", "scale_type_size", "max_total_recv_tokens", "rdma_block_num"), 0),
    **dict.fromkeys(("world_size", "hidden_dim", "max_token_type_size", "max_num_inp_token_per_rank"), 1),
    **dict.fromkeys(("num_experts_per_rank", "num_experts_per_token", "warp_num_per_block", "block_num"), 1),
    **dict.fromkeys(("gpu_per_node", "num_qp_per_pe"), 1),
}


def test_every_field_of_a_configuration() -> None:
    """Refused before there is an op, on this rank alone."""
    fields = {
        "data_type": Other(("bfloat16", None, 7, float)),
        "dispatch_dtype": Other(("bfloat16", 7, float)),
        "combine_dtype": Other(("bfloat16", 7, float)),
        "kernel_type": Other(("IntraNode", "intranode", None, 6, -1, 0.5, True)),
        "quant_type": Other(("fp8", None, 7)),
        "use_external_inp_buf": Flag(),
        "elastic": Flag(),
        **{name: Whole(low) for name, low in _LOWEST.items()},
    }
    assert set(fields) == set(EpDispatchCombineConfig.__dataclass_fields__)
    good = {
        **{name: max(1, low) for name, low in _LOWEST.items()},
        "data_type": torch.bfloat16,
        "rank": 0,
        "quant_type": "none",
    }

    def make(**given: Any) -> None:
        EpDispatchCombineConfig(**given).check()

    for title, function in (("check", make), ("an engine's op", _engine_op)):
        told([refused({title: Entry(function, good, fields)})])
    assert EpDispatchCombineConfig(**{**good, "kernel_type": 5, "elastic": 1}).check() is None

    class Ranks:
        rank, world_size = 0, 2

    sizes = {"num_experts": 8, "data_type": torch.bfloat16, "hidden_dim": 8}
    sizes |= {"max_num_inp_token_per_rank": 4, "num_experts_per_token": 2, "comm": Ranks}
    kinds = {
        "num_experts": Other(("8", 2.5, None, 0, 7)),
        "data_type": Other(("bfloat16", None, 7)),
        "comm": Other((None, "comm")),
    }
    told([refused({"for_comm": Entry(EpDispatchCombineConfig.for_comm, sizes, kinds)})])


def _engine_op(**given: Any) -> None:
    engines.ops.EpDispatchCombineOp(EpDispatchCombineConfig(**given))


def test_what_ops_are_made_of_and_what_comes_before_them() -> None:
    config = EpDispatchCombineConfig(torch.bfloat16, 0, 1, 8, 0, 1, 2, 4, 4, 2)
    make = EpDispatchCombineOp
    wrong = {
        "op": Entry(
            make,
            {"config": config, "comm": None},
            {
                "config": Other((None, 7, {}, "config")),
                "comm": Other((7, "comm", object())),
                "geometry": Other((7, "fast", {"both": PLANNED}, {"dispatch": 3})),
            },
        ),
        "engine": Entry(engines.ops.EpDispatchCombineOp, {}, {"config": Other((None, 7, {}))}),
        "init": Entry(
            engines.shmem_torch_process_group_init, {}, {"group_name": Other((None, 7, "nobody's", b"mori"))}
        ),
        "join": Entry(
            internode.join,
            {"ranks_per_node": 1, "rank": 0, "world_size": 1},
            {
                "ranks_per_node": Whole(1),
                "engine": Other(("ucx", 7)),
                "timeout_s": Other(("soon", -1.0)),
                "rank": Other((None, 1, -1)),
            },
            called={"engine": "ENGINE", "timeout_s": "TIMEOUT"},
        ),
        "Config": Entry(Config, {"num_sms": 8}, dict.fromkeys(Config.__dataclass_fields__, Whole(1))),
    }
    told([refused(wrong)])
    for call in (engines.shmem_mype, engines.shmem_npes):
        with pytest.raises(MoriError, match="call shmem_torch_process_group_init"):
            call()


BENCH = {
    "--tokens": ("-1", "x", "1.5", ""),
    "--hidden": ("0", "x"),
    "--topk": ("0", "x", "32", "300"),
    "--experts": ("0", "7", "x"),
    "--kernel-type": ("intranode", "7", ""),
    "--dtype": ("int8", "bfloat16"),
    "--combine-dtype": ("int8", "fp4"),
    "--quant-type": ("fp8", "int4"),
    "--scale-dim": ("-1", "x"),
    "--zero-copy": ("2", "yes"),
    "--num-qp": ("0", "x"),
    "--routing": ("round-robin", "/dev/null"),
    "--rounds": ("0", "x"),
    "--nodes": ("0", "x", "3", "2"),
    "--engine": ("ucx", "gloo"),
    "--reps": ("0", "x"),
    "--warmup": ("-1", "x"),
    "--world-size": ("0", "x"),
    "--backend": ("tpu", "sycl"),
    "--seed": ("x",),
    "--json": ("/nowhere/x.json",),
    "--trace": ("/nowhere/x.json",),
    "--break": ("everything",),
}


@pytest.mark.parametrize("option", BENCH)
def test_every_option_of_the_bench(option: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Refused with the option and the value, before ranks are started. Two nodes, or an engine between them,
    mean nothing to a kernel type inside one."""
    for value in BENCH[option]:
        with pytest.raises(SystemExit) as status:
            bench_main(
                ["--world-size", "2", "--tokens", "4", "--hidden", "64", "--experts", "64", option, value]
            )
        assert status.value.code == 2
        error = capfd.readouterr().err
        assert "Traceback" not in error
        assert option in error or option[2:].replace("-", "_") in error, error


def test_the_table_of_the_bench_names_every_option() -> None:
    from mori_ep.bench.__main__ import parser

    known = {flag for action in parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert known - {"--help", "--no-compare", *BENCH} == set()
