"""Every public entry, with every kind of wrong argument: an error of ours, on the rank that gave it, before
any rank waits.

Two ranks; only rank 1 makes the wrong calls, so one that waited for rank 0 would come back too late and with
another error. Then both make a right call: nothing may have been used up.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import mori_shmem
import numpy as np
import torch
from mori_megamoe import MegaMoE, MegaMoEStage1Sdma, Problem, mx, quantize_weights, shuffle_weights
from mori_megamoe.testing import Toy, same_bytes, smoke
from mori_shmem.errors import ArgumentError

HELPS = re.compile(
    r"needed|is all there is|allowed:|at most|at least|two bits|0 \(none\) or more|a number of rows, or 0"
    r"|next larger one is|None, or|the communicator is rank|are possible|must be|starts 1 to"
)
TOY = Toy(2)
INPUTS = TOY.inputs((6, 5))
ODD = {"text": "x", "a list": [1.5], "an object": object(), "numpy": np.ones(3), "a tensor": torch.ones(3)}


def wrong_numbers() -> Iterator[tuple[str, Any]]:
    yield from ODD.items()
    yield from {"None": None, "a float": 2.5, "negative": -1, "a flag": True}.items()


def wrong_words() -> Iterator[tuple[str, Any]]:
    yield from {**ODD, "a number": 3}.items()


def wrong_flags() -> Iterator[tuple[str, Any]]:
    yield from {**ODD, "a number": 1}.items()


def wrong_tensors(x: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield from {"text": "x", "a list": [1.5], "numpy": np.ones(3), "a number": 3, "None": None}.items()
    yield "sparse", torch.zeros(x.shape).to_sparse()
    yield "nested", torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    yield "another dtype", x.to(torch.float64) if x.dtype != torch.float64 else x.int()
    yield "flat", x.flatten()[:-1]
    yield "no dimension", x.flatten()[0]


Wrong = tuple[str, Callable[[], object]]


def constructions(comm: mori_shmem.Communicator) -> Iterator[Wrong]:
    weights = TOY.weights(comm.rank)._asdict()
    wrong: dict[str, Iterator[tuple[str, Any]]] = {
        **{
            name: wrong_numbers()
            for name in (
                *("rank", "world_size", "model_dim", "inter_dim"),
                *("experts", "topk", "max_tok_per_rank"),
            )
        },
        **{name: wrong_words() for name in ("quant", "mega_scheme", "partials")},
        **{name: wrong_tensors(part) for name, part in weights.items()},
        "swiglu_limit": iter({**ODD, "None": None, "negative": -1.0, "a flag": True}.items()),
        "fanout_masks": iter(
            {
                **ODD,
                "None": None,
                "a number": 3,
                "negative": (-10, 0),
                "floats": (3.0, 0.0),
                "three": (0, 0, 0),
                "one bit": (1, 0),
                "far bits": (0b1001, 0),
            }.items()
        ),
        "comm": iter({**ODD, "a number": 3}.items()),
    }
    for name, values in wrong.items():
        for kind, value in values:
            yield f"MegaMoE({name}={kind})", lambda name=name, value=value: TOY.layer(comm, **{name: value})


def calls(moe: MegaMoE) -> Iterator[Wrong]:
    x, weights, ids = INPUTS[moe.comm.rank]
    x_q, scales = moe.quantize(x)
    entries: list[tuple[Callable[..., Any], dict[str, torch.Tensor]]] = [
        (call, {"x_bf16": x, "wts": weights, "topk_ids": ids})
        for call in (moe, moe.forward, moe.forward_bf16, moe.stage1_only)
    ]
    entries.append(
        (moe.forward_prequant, {"x_q": x_q, "scales": scales, "wts": weights, "topk_ids": ids}),
    )
    entries.append((moe.quantize, {"x_bf16": x}))
    for call, good in entries:
        title = getattr(call, "__name__", "moe")
        for name, tensor in good.items():
            for kind, value in wrong_tensors(tensor):
                yield f"{title}({name}={kind})", lambda c=call, g=good, n=name, v=value: c(**{**g, n: v})
        if call == moe.quantize:
            continue
        flags = ["mask_invalid_slots"] + ["slice_output"] * (call != moe.stage1_only)
        for name in flags:
            for kind, value in wrong_flags():
                yield f"{title}({name}={kind})", lambda c=call, g=good, n=name, v=value: c(**g, **{n: v})
    for kind, value in [*ODD.items(), ("None", None), ("two", TOY.weights(0)[:2]), ("texts", ("a",) * 4)]:
        yield f"moe.weights = {kind}", lambda value=value: setattr(moe, "weights", value)
    for kind, value in [*ODD.items(), ("a number", 1)]:
        yield f"moe.trace = {kind}", lambda value=value: setattr(moe, "trace", value)
        yield f"replace_stage1({kind})", lambda value=value: moe.replace_stage1(value)
        yield f"window_bytes_for({kind})", lambda value=value: MegaMoE.window_bytes_for(value)
    yield "replace_stage1(None)", lambda: moe.replace_stage1(None)  # type: ignore[arg-type]
    yield "window_bytes_for(bad)", lambda: MegaMoE.window_bytes_for(Problem(256, 256, 4, 2, 2, 100))


def stages(moe: MegaMoE) -> Iterator[Wrong]:
    choices: dict[str, Iterator[tuple[str, Any]]] = {
        **{name: wrong_words() for name in ("scale_mode", "gemm1", "order", "puts", "mover")},
        **{name: wrong_numbers() for name in ("workers", "packers", "shufflers", "merge_rows")},
        "slot_experts": wrong_numbers(),
        "slot_slack": ((kind, value) for kind, value in wrong_numbers() if kind != "a float"),
        "fuse_quant": wrong_flags(),
    }
    for name, values in choices.items():
        for kind, value in values:
            yield f"Stage1({name}={kind})", lambda n=name, v=value: MegaMoEStage1Sdma(moe, **{n: v})
    for kind, value in [*ODD.items(), ("None", None), ("its stage", moe.stage1)]:
        yield f"Stage1(moe={kind})", lambda value=value: MegaMoEStage1Sdma(value)


def weights() -> Iterator[Wrong]:
    w1, w2 = torch.randn(2, 512, 256), torch.randn(2, 256, 256)
    for kind, value in [*wrong_tensors(w1), ("narrow", w1[..., :250]), ("one expert", w1[:1])]:
        yield f"quantize_weights(w1={kind})", lambda value=value: quantize_weights(value, w2)
    for kind, value in [*wrong_tensors(w2), ("narrow", w2[..., :250]), ("other rows", w2[:, :128])]:
        yield f"quantize_weights(w2={kind})", lambda value=value: quantize_weights(w1, value)
    logical = quantize_weights(w1, w2)
    for kind, value in [*ODD.items(), ("None", None), ("two", logical[:2])]:
        yield f"shuffle_weights({kind})", lambda value=value: shuffle_weights(value)  # type: ignore[arg-type]
    for name, part in logical._asdict().items():
        for kind, value in wrong_tensors(part):
            yield (
                f"shuffle_weights({name}={kind})",
                lambda n=name, v=value: shuffle_weights(logical._replace(**{n: v})),
            )
    for rule in (mx.quantize_input, mx.quantize_hidden, mx.quantize_partial, mx.quantize_weight):
        for kind, value in [("text", "x"), ("None", None), ("codes", logical.w1), ("narrow", w1[..., :250])]:
            yield f"{rule.__name__}({kind})", lambda r=rule, v=value: r(v)
    for kind, value in wrong_numbers():
        yield f"smoke({kind})", lambda value=value: smoke(value)
        yield f"Problem(topk={kind})", lambda value=value: Problem(256, 256, 4, value, 2, 64).check()


def raw(wrong: Iterator[Wrong]) -> list[str]:
    """Those that are not answered as they should be."""
    found = []
    for title, call in wrong:
        began = time.monotonic()
        try:
            call()
        except ArgumentError as error:
            if not HELPS.search(str(error)):
                found.append(f"{title}: says not what is allowed: {error}")
        except Exception as error:
            found.append(f"{title}: {type(error).__name__}: {error}")
        else:
            found.append(f"{title}: passed")
        if time.monotonic() - began > 5:
            found.append(f"{title}: took {time.monotonic() - began:.1f} s")
    return found


def test_every_wrong_argument_of_a_rank_is_answered_by_that_rank_alone() -> None:
    want = TOY.reference(INPUTS)

    def rank() -> list[str]:
        with mori_shmem.init(timeout_s=120) as comm:  # rank 0 waits while rank 1 tries them all
            found = raw(constructions(comm)) if comm.rank else []
            with TOY.layer(comm) as moe:
                if comm.rank:
                    found += raw(calls(moe)) + raw(stages(moe))
                assert same_bytes(moe(*INPUTS[comm.rank]), want[comm.rank].out)
            return found

    found = mori_shmem.run_ranks(rank, 2, timeout_s=240)[1]
    assert not found, "\n".join(found)


def test_wrong_weights_and_sizes_are_answered() -> None:
    found = raw(weights())
    assert not found, "\n".join(found)


def test_what_numpy_and_routers_bring_is_taken() -> None:
    (given,) = Toy(1).inputs((6,))
    with mori_shmem.init(rank=0, world_size=1) as comm:
        limits = {"swiglu_limit": np.float32(10), "fanout_masks": torch.tensor([3])}
        with Toy(1).layer(comm, **limits) as moe:
            assert same_bytes(moe(*given), Toy(1).reference([given])[0].out)
            x = given.x.clone().requires_grad_()
            assert not any(part.requires_grad for part in moe.quantize(x))
    logical = quantize_weights(torch.randn(2, 512, 256).requires_grad_(), torch.randn(2, 256, 256))
    assert not any(part.requires_grad for part in logical)
