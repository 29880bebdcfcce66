"""`RowParallelLinear`: y = sum over ranks of x_r @ W_r^T, + bias; K is split between the ranks.

    layer = RowParallelLinear.from_linear(linear, comm, m_max=16384)       # quantises this rank's share
    y = layer(x)                                        # [.., K / ranks] -> [.., N] bf16, on every rank

The layer holds this rank's columns of the weight as fp8 codes with scales. They may come as
  bf16, fp16 or fp32    quantised when they are loaded
  e4m3fn with scales    taken as they are; also under the name `weight_scale_inv`, as some checkpoints call it
and either as this rank's share [N, K / ranks] or whole [N, K], of which the share is cut here; the same
through `load_state_dict`. Activations are quantised when they come, unless they come as (codes, scales).

bias   One for all ranks, added to the finished sum, once, on every rank alike.
op     Windows are large. Layers of one shape share an op: pass the first one's. Calls of all that share it
       must then follow one another in the same order on every rank.
copy   The result is a new tensor. copy=False: eagerly, without a bias, it is a view of the op's window, good
       until the next call of any layer that shares the op. Compiled code always copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError, UnsupportedShape

from mori_gemm_ar.nn.functional import add_bias, by_handle, handle_of, in_window
from mori_gemm_ar.op import GemmAllReduce
from mori_gemm_ar.quant.formats import UE8M0_BIAS
from mori_gemm_ar.quant.operands import FP8
from mori_gemm_ar.quant.quantize import blocks_of, quantize

SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # both multiply a code to give its value
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class RowParallelLinear(torch.nn.Module):
    """See the module. `in_features` is the whole K, as in the layer that this one stands for."""

    weight: torch.Tensor  # [out_features, in_features / ranks] e4m3fn
    weight_scale: torch.Tensor
    bias: torch.Tensor | None  # [out_features]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        comm: mori_shmem.Communicator | None = None,
        m_max: int | None = None,
        op: GemmAllReduce | None = None,
        copy: bool = True,
        bias_dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        """Collective. With `op` that one is used and stays its owner's; else one is made on `comm` for calls
        of up to `m_max` rows with `options` (those of GemmAllReduce), and closed with this layer."""
        super().__init__()
        self.in_features, self.out_features, self.copy = in_features, out_features, copy
        self.op, self._owns = op_for(op, comm, m_max, in_features, out_features, options), op is None
        self.share_features: int = self.op.k
        self._quant, self._handle = self.op.options.quant, handle_of(self.op)
        device, blocks = self.op.comm.device, blocks_of(self._quant, "b")
        codes = torch.zeros(out_features, self.share_features, dtype=torch.uint8, device=device).view(FP8)
        grid = blocks.grid(out_features, self.share_features)
        shape = grid[:1] if self._quant == "ptpc" else grid
        one = torch.tensor(UE8M0_BIAS, dtype=torch.uint8) if blocks.scale == "ue8m0" else torch.ones(())
        zeros = torch.zeros(out_features, dtype=bias_dtype, device=device)
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale", one.to(device).expand(shape).clone())
        self.register_buffer("bias", zeros if bias else None)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, comm: mori_shmem.Communicator | None = None, **options: Any
    ) -> RowParallelLinear:
        """The layer that stands for `linear`, whose weight and bias are the whole ones. Collective."""
        bias = linear.bias
        made = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            comm=comm,
            bias_dtype=torch.bfloat16 if bias is None else bias.dtype,
            **options,
        )
        try:
            made.load(linear.weight.detach(), bias=None if bias is None else bias.detach())
        except BaseException:
            made.close()
            raise
        return made

    # ---- weights ----

    @torch.no_grad()
    def load(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Take a weight, whole or this rank's share, in floats or as codes with scales; and a bias. What is
        refused leaves the layer as it was."""
        self.check_bias(bias)
        codes, scale = self.quantised(weight, weight_scale)
        self.weight.copy_(codes)
        self.weight_scale.copy_(scale)
        if bias is not None and self.bias is not None:
            self.bias.copy_(bias)

    def check_bias(self, bias: torch.Tensor | None) -> None:
        """Refuse one that this layer cannot take."""
        if (bias is None) != (self.bias is None):
            has, given = ("no", "one") if self.bias is None else ("a", "none")
            raise ArgumentError(f"this layer has {has} bias, {given} was given")
        if bias is not None and bias.shape != (self.out_features,):
            raise UnsupportedShape(
                f"bias has shape {tuple(bias.shape)}: wanted {[self.out_features]}, one value for each of "
                f"out_features={self.out_features}, the same on every rank"
            )

    def quantised(
        self, weight: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) of this rank's share."""
        if weight.dtype in FLOATS:
            if scale is not None:
                raise ArgumentError(f"a weight of {weight.dtype} takes no scales, it is quantised here")
            share = self.own_columns(weight, self.share_features, "weight").to(self.weight.device)
            return quantize(share if share.dtype == torch.bfloat16 else share.float(), self._quant, "b")
        if weight.dtype != FP8:
            raise UnsupportedShape(
                f"weight is {weight.dtype}: wanted bf16, fp16, fp32, or float8_e4m3fn with its scales "
                "(e4m3fnuz codes: mori_gemm_ar.convert_fnuz)"
            )
        if scale is None:
            raise ArgumentError(
                f"a weight of {weight.dtype} comes with its scales: {' or '.join(SCALE_NAMES)}"
            )
        return self.own_columns(weight, self.share_features, "weight"), self.own_scale(scale)

    def own_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """This rank's share of the weight's scales; one a row belongs to all ranks."""
        if self._quant == "ptpc":
            return scale.reshape(self.weight_scale.shape)
        blocks = blocks_of(self._quant, "b")
        assert blocks.columns is not None
        columns = self.weight_scale.shape[1]
        if scale.shape[1] != columns and self.share_features % blocks.columns:
            raise UnsupportedShape(
                f"scales of the whole weight cannot be cut: {self.share_features} columns of a rank are no "
                f"whole number of blocks of {blocks.columns}"
            )
        return self.own_columns(scale, columns, "weight_scale")

    def own_columns(self, whole: torch.Tensor, columns: int, name: str) -> torch.Tensor:
        """`whole` itself if it is this rank's share, else the share cut out of it."""
        rank, num_ranks = self.op.comm.rank, self.op.comm.world_size
        rows = (self.weight if name == "weight" else self.weight_scale).shape[0]
        if whole.dim() == 2 and whole.shape[0] == rows:
            if whole.shape[1] == columns:
                return whole
            if whole.shape[1] == columns * num_ranks:
                return whole[:, rank * columns : (rank + 1) * columns]
        raise UnsupportedShape(
            f"{name} has shape {tuple(whole.shape)}: wanted this rank's share {[rows, columns]}, "
            f"or the whole {[rows, columns * num_ranks]}"
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Weights of any accepted form become this rank's codes and scales before torch's own loading."""
        weight = state_dict.get(prefix + "weight")
        scales = {name: state_dict[prefix + name] for name in SCALE_NAMES if prefix + name in state_dict}
        given = dict(state_dict)
        if weight is not None and len(scales) < 2:
            codes, scale = self.quantised(weight, next(iter(scales.values()), None))
            given.update({prefix + "weight": codes, prefix + "weight_scale": scale})
            given.pop(prefix + "weight_scale_inv", None)
        super()._load_from_state_dict(given, prefix, *arguments)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RowParallelLinear:
        """`.half()`, `.to(..)` and the like: codes and scales move to another device, but are never cast."""
        held = {id(self.weight), id(self.weight_scale)}
        kept: Any = super()._apply  # untyped in torch
        kept(lambda tensor: moved(fn, tensor) if id(tensor) in held else fn(tensor), recurse)
        return self

    # ---- the call ----

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor | None = None) -> torch.Tensor:
        """[.., N] bf16. Collective.

        x        # [.., K / ranks] bf16, fp16 or fp32; or e4m3fn codes with `x_scale`, as the op takes them
        """
        if x.shape[-1] != self.share_features:
            raise UnsupportedShape(
                f"x has {x.shape[-1]} columns, a rank's share of {self.in_features} is {self.share_features}"
            )
        check_dtype(x.dtype, x_scale is not None)
        rows = x.reshape(-1, self.share_features)
        if x_scale is None:
            a, a_scale = quantize(rows if rows.dtype == torch.bfloat16 else rows.float(), self._quant, "a")
        else:
            a, a_scale = rows, x_scale
        operands = a, self.weight, a_scale, self.weight_scale
        if torch.compiler.is_compiling():
            y = by_handle(self._handle, self.out_features, *operands, self.bias)
        else:
            view = in_window(self.op, *operands)
            y = add_bias(view, self.bias) if self.bias is not None else view.clone() if self.copy else view
        return y.view(*x.shape[:-1], self.out_features)

    # ---- life ----

    def close(self) -> None:
        """Give the window back, if this layer made it. Local; twice is fine."""
        if self._owns:
            self.op.close()

    def __enter__(self) -> RowParallelLinear:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def extra_repr(self) -> str:
        options = self.op.options
        words: Mapping[str, object] = {
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "ranks": self.op.comm.world_size,
            "m_max": self.op.m_max,
            "quant": options.quant,
            "mode": options.mode,
            "gather_dtype": options.gather_dtype,
        }
        return ", ".join(f"{name}={value}" for name, value in words.items())


def check_dtype(given: torch.dtype, scaled: bool) -> None:
    """Refuse an x that is neither values to quantise nor codes with their scales."""
    if given == FP8 if scaled else given in FLOATS:
        return
    raise UnsupportedShape(
        f"x is {given}, {'with' if scaled else 'without'} x_scale: allowed are bf16, fp16 or fp32 without "
        "x_scale, or float8_e4m3fn codes with x_scale; convert x, or pass its scales"
    )


def moved(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """fn(tensor), but of fn's casts and moves only the moves."""
    result = fn(tensor)
    return result if result.dtype == tensor.dtype else tensor.to(result.device)


def op_for(
    op: GemmAllReduce | None,
    comm: mori_shmem.Communicator | None,
    m_max: int | None,
    in_features: int,
    out_features: int,
    options: Mapping[str, Any],
) -> GemmAllReduce:
    """The op given, if it fits such a layer; else a new one."""
    if op is None:
        if comm is None or m_max is None:
            raise ArgumentError("RowParallelLinear takes either op=, or comm= and m_max= (and options)")
        if in_features % comm.world_size:
            raise UnsupportedShape(
                f"in_features={in_features} on {comm.world_size} ranks: every rank must have as many columns"
            )
        if options.get("mode") == "gemm-only":
            raise ArgumentError("mode='gemm-only': the layer's result is the sum over ranks, which it lacks")
        k = in_features // comm.world_size
        return GemmAllReduce(comm, n=out_features, k=k, m_max=m_max, **options)
    if comm is not None or m_max is not None or options:
        names = ["comm"] * (comm is not None) + ["m_max"] * (m_max is not None) + sorted(options)
        raise ArgumentError(f"{', '.join(names)} beside op=: the op given has its own")
    if (op.n, op.k * op.comm.world_size) != (out_features, in_features) or not op.options.communicates:
        raise UnsupportedShape(
            f"the op given is for N={op.n}, K={op.k} of each of {op.comm.world_size} ranks, "
            f"mode={op.options.mode!r}; this layer has N={out_features}, K={in_features} in all, and its "
            "result is the sum over ranks"
        )
    return op
