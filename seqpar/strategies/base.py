"""What all attention modules share: the call's arguments, and the operators that it lowers to.

Each call is one operator forward and one backward, communication included, so that torch.compile and checkpointing see
them whole. Layouts and groups enter as keys: a layout as a CPU tensor that names it (nothing specialises on it, and the
next batch does not recompile), a module as a string that its configuration determines.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.attend import accumulator_dtype, sinks_gradient
from seqpar.comm import Comm, Group
from seqpar.geometry import CuSeqlens, Ints
from seqpar.layout import Layout
from seqpar.strategies.agree import shape_of
from seqpar.strategies.call import SCHEMA, Call, Parameters, check
from seqpar.strategies.engine import Engine


@dataclass(frozen=True)
class Strategy:
    """What moves between ranks, in forward and in backward. q (B, T_local, Hq, D), k and v (B, Tkv_local, Hkv, D or Dv).

    Its fields are its options.
    """

    name: ClassVar[str]

    def forward(self, comm: Comm, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        """out (B, T_local, Hq, Dv) in q's dtype, lse (B, T_local, Hq), and the residuals that backward needs.

        No residuals means that backward is given q, k, v, out and lse.
        """
        raise NotImplementedError

    def backward(
        self, comm: Comm, call: Call, dout: Tensor, dlse: Tensor | None, residuals: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of this rank's tokens, in the accumulator's dtype or already in theirs."""
        raise NotImplementedError

    def joined(self, ranks: int) -> int:
        """How many consecutive ranks' tokens come together on one rank."""
        return 1

    def areas(self, call: Call, ranks: int, rank: int, heads: int) -> list[int]:
        """The pairs of query and key that see each other, times the query heads, that a rank computes in each step."""
        raise NotImplementedError

    def empty_residuals(self, comm: Comm, q: Tensor, k: Tensor, v: Tensor, tokens: int, kv_tokens: int) -> list[Tensor]:
        """Tensors like forward's residuals: what torch.compile traces with."""
        return []


class Attention(nn.Module):
    """Softmax attention over a packed batch whose tokens are spread over the ranks of a group.

    All subclasses take the same call and give the same answer, forward and backward, on any layout; they differ in what
    they send. `group` is a process group or a 1-D DeviceMesh. `check_ranks=True` compares a digest of each call over the
    ranks first (32 bytes to each peer), so that ranks that disagree all raise the same ValueError instead of hanging.
    `deterministic=True` promises the same bits for the same call; on CPU that holds either way.
    """

    strategy: ClassVar[type[Strategy]]
    dimensions: ClassVar[int] = 1

    def __init__(self, group: Group, check_ranks: bool = False, deterministic: bool = True, **options: Any) -> None:
        super().__init__()
        self.engine: Engine[Strategy] = Engine.make(self.strategy(**options), group, self.dimensions, check_ranks)
        self.key = self.engine.key
        self.deterministic = bool(deterministic)

    def extra_repr(self) -> str:
        comm = self.engine.comm
        return f"rank={comm.rank}, ranks={comm.size}, check_ranks={self.engine.check_ranks}"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: Layout,
        *,
        causal: bool,
        kv_layout: Layout | None = None,
        prefix_lens: CuSeqlens | None = None,
        window_size: tuple[int, int] = (-1, -1),
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        dropout_p: float = 0.0,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the keys of all ranks, each document on its own.

        Args:
            q: (T_local, Hq, D) or (B, T_local, Hq, D), in the layout's local order; fp64, fp32, bf16 or fp16.
            k: (Tkv_local, Hkv, D) or with the batch in front; Hq must be a multiple of Hkv.
            v: (Tkv_local, Hkv, Dv), likewise.
            layout: which tokens of the packed batch each rank holds.
            causal: whether a query sees no key behind its own position. It must be said.
            kv_layout: the layout of k and v, where they are other tokens than q (cross attention, chunked prefill): the
                same documents and ranks, ends aligned as in flash-attn. Default: `layout`.
            prefix_lens: (documents,) ints; every token of a document sees its first so many keys besides.
            window_size: (left, right), as in flash-attn: how many keys before and behind its own position a query sees;
                −1 is unlimited, and `causal` cuts right at 0.
            softmax_scale: what q·k is multiplied by. Default: 1/√D.
            softcap: c > 0 turns a score s into c·tanh(s/c), as in Gemma 2.
            sinks: (Hq,) a learnable logit a head that joins the softmax's denominator, as in GPT-OSS. Its gradient is
                summed over this rank's queries.
            return_lse: also return the natural-log lse of the keys alone, (T_local, Hq) or (B, T_local, Hq), fp32 (fp64
                for fp64), differentiable. A row that sees no key has out 0 and lse −inf.
            dropout_p: must be 0; dropout over sharded keys is not offered.

        Returns:
            out (T_local, Hq, Dv) or with the batch in front, in q's dtype; or (out, lse).

        The gradients are those of the sum of all ranks' losses. Under autocast q, k and v are cast as SDPA's are.

        Raises:
            ValueError: naming the argument, before anything is sent, if the call is wrong or cannot be computed exactly.
        """
        parameters = self._arguments(
            q, layout, causal=causal, kv_layout=kv_layout, prefix_lens=prefix_lens, window_size=window_size,
            softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p, deterministic=self.deterministic,
            return_lse=return_lse,
        )  # fmt: skip
        out, lse, _ = torch.ops.seqpar.attention(*operands(q, k, v, sinks), *parameters)
        if q.dim() == 3:
            out, lse = out[0], lse[0]
        return (out, lse) if return_lse else out

    def _arguments(self, q: Tensor, layout: Layout, **options: Any) -> Parameters:
        rank, joined = self.engine.comm.rank, self.engine.strategy.joined(self.engine.comm.size)
        row = slice(rank // joined * joined, (rank // joined + 1) * joined)
        return Parameters.of(self.key, q, layout, row, **options)

    def mask_area(self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Any) -> Ints:
        """(ranks, steps): how many (query, key) pairs see each other, times query heads, in what each rank computes when.

        Takes what a call takes (of the tensors just the shapes matter); computes and sends nothing, and is the same on all
        ranks. Steps that no rank has work in are left in. The slowest rank of a step holds up the others where they wait
        for each other, so max over mean of a column is what balance costs: `area.max(0) / area.mean(0)`.
        """
        sinks, comm = options.pop("sinks", None), self.engine.comm
        call = check(comm, self._arguments(q, layout, **options), *operands(q, k, v, sinks))
        steps = [self.engine.strategy.areas(call, comm.size, rank, q.shape[-2]) for rank in range(comm.size)]
        return np.array(steps, dtype=np.int64)

    def unsupported(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, *, sinks: Tensor | None = None, **options: Any
    ) -> str | None:
        """Why this rank would refuse the call, or None. Takes what a call takes; computes and sends nothing."""
        try:
            check(self.engine.comm, self._arguments(q, layout, **options), *operands(q, k, v, sinks))
        except ValueError as refusal:
            return str(refusal)
        return None


def operands(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q, k and v as (B, T, H, D), under autocast cast as SDPA's are, and the sinks. What would mislead dispatch is refused."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() not in (3, 4) or x.dim() != q.dim():
            raise ValueError(f"{name} must be (T, H, D), or (B, T, H, D) like the others, got {tuple(x.shape)}")
    for name, other in (("k", k), ("v", v), ("sinks", sinks)):
        if other is not None and other.device != q.device:
            raise ValueError(f"{name} must be on q's device, {q.device}, got {other.device}")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    if q.dim() == 3:
        q, k, v = q[None], k[None], v[None]
    return q, k, v, sinks


torch.library.define(
    "seqpar::attention",
    f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {SCHEMA}) -> (Tensor out, Tensor lse, Tensor[] residuals)",
)
torch.library.define(
    "seqpar::attention_backward",
    "(Tensor? dout, Tensor? dlse, Tensor? sinks, Tensor[] home, Tensor[] residuals, "
    f"SymInt[] q_shape, SymInt[] k_shape, SymInt[] v_shape, {SCHEMA}) -> Tensor[] gradients",
)


@torch.library.impl("seqpar::attention", ("cpu", "cuda"))
def _attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *tail: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    parameters = Parameters(*tail)
    engine: Engine[Strategy] = Engine.of(parameters.engine)
    checked = partial(check, engine.comm, parameters, q, k, v, sinks)
    call = engine.checked(checked, lambda: shape_of(q, k, v) | parameters.shared(sinks))
    engine.begins("forward")
    with torch.autocast(q.device.type, enabled=False):
        return engine.strategy.forward(engine.comm, call, *(unit_stride(x) for x in (q, k, v)))


@torch.library.register_fake("seqpar::attention")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *tail: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    parameters, exact = Parameters(*tail), accumulator_dtype(q.dtype)
    engine: Engine[Strategy] = Engine.of(parameters.engine)
    residuals = engine.strategy.empty_residuals(engine.comm, q, k, v, parameters.tokens, parameters.kv_tokens)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=exact), residuals


@torch.library.impl("seqpar::attention_backward", ("cpu", "cuda"))
def _attention_backward(
    dout: Tensor | None, dlse: Tensor | None, sinks: Tensor | None, home: list[Tensor], residuals: list[Tensor],
    q_shape: list[int], k_shape: list[int], v_shape: list[int], *tail: Any,
) -> list[Tensor]:  # fmt: skip
    parameters, dtype = Parameters(*tail), residuals[0].dtype
    engine: Engine[Strategy] = Engine.of(parameters.engine)
    dout = residuals[0].new_zeros((*q_shape[:-1], v_shape[-1])) if dout is None else unit_stride(dout)
    engine.begins("backward")
    with torch.autocast(dout.device.type, enabled=False):
        call = parameters.call(engine.comm, k_shape[2], sinks)
        exact = engine.strategy.backward(engine.comm, call, dout, dlse, [unit_stride(x) for x in residuals])
        gradients = [gradient.to(dtype) for gradient in exact]
        return gradients if sinks is None else [*gradients, sinks_gradient(dout, home[0], home[1], sinks)]


@torch.library.register_fake("seqpar::attention_backward")  # type: ignore[untyped-decorator]
def _(
    dout: Tensor | None, dlse: Tensor | None, sinks: Tensor | None, home: list[Tensor], residuals: list[Tensor],
    q_shape: list[int], k_shape: list[int], v_shape: list[int], *tail: Any,
) -> list[Tensor]:  # fmt: skip
    gradients = [residuals[0].new_empty(shape) for shape in (q_shape, k_shape, v_shape)]
    return gradients if sinks is None else [*gradients, torch.empty_like(sinks)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, sinks, *tail = inputs
    out, lse, residuals = output
    parameters = Parameters(*tail)
    ctx.set_materialize_grads(False)
    ctx.shapes = q.shape, k.shape, v.shape
    ctx.settings = parameters[3:]
    ctx.engine = Engine.of(parameters.engine)  # kept alive
    home = [] if sinks is None else [out, lse]
    ctx.save_for_backward(*parameters[:3], sinks, *home, *(residuals or (q, k, v, out, lse)))


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    layout, kv_layout, prefix_lens, sinks, *saved = ctx.saved_tensors
    home, residuals = ([], saved) if sinks is None else (saved[:2], saved[2:])
    parameters = Parameters(layout, kv_layout, prefix_lens, *ctx.settings)
    gradients = torch.ops.seqpar.attention_backward(dout, dlse, sinks, home, residuals, *ctx.shapes, *parameters)
    return (*gradients, *[None] * (sinks is None), *[None] * len(parameters))


def no_double_backward(ctx: Any, *_: Any) -> None:
    raise RuntimeError("seqpar attention cannot be differentiated twice (create_graph=True)")


torch.library.register_autograd("seqpar::attention", _backward, setup_context=_setup_context)
torch.library.register_autograd("seqpar::attention_backward", no_double_backward)


def unit_stride(x: Tensor) -> Tensor:
    """`x` with a contiguous last dimension, which every backend takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
