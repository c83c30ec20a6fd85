"""The base of `LASP2Attention` and `RecurrentAttention`: arguments in, operator, results out."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
from torch import Tensor

import seqpar.linear.operator  # noqa: F401  defines torch.ops.seqpar.linear_attention
from seqpar.attention.backend import DEFAULT, current_backend
from seqpar.attention.module import BoundModule
from seqpar.attention.operands import check_layouts, fold_scale, prepare_operands
from seqpar.attention.operators import refuse_tangents
from seqpar.attention.rehearsal import Preparation, described_call
from seqpar.comm.dtensor import HeadPlacement, local_heads
from seqpar.core.arguments import as_bool, as_float, check_tensor
from seqpar.layout.handle import sizes_of
from seqpar.layout.layout import Layout
from seqpar.linear.call import CallArguments, ResolvedCall, batch_second, returned
from seqpar.linear.inputs import Inputs
from seqpar.linear.rehearsal import LinearPreparation, empty_inputs
from seqpar.linear.strategy import LinearStrategy

OperatorTensors = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class OptionalArguments(TypedDict, total=False):
    """The keyword arguments of a call of either module."""

    causal: bool
    log_decay: Tensor | None
    beta: Tensor | None
    scale: float | Tensor
    initial_state: Tensor | None
    return_state: bool


class PreparedOptions(TypedDict, total=False):
    """Further arguments of `preparation`."""

    value_dim: int
    batch: int
    causal: bool
    initial_state: bool
    return_state: bool


class LinearModule(BoundModule[LinearStrategy[Any]]):
    """Linear attention over a packed batch whose tokens are spread over the ranks of a group."""

    strategy: ClassVar[type[LinearStrategy[Any]]]
    _decay: Literal["constant", "head", "key"] | None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Unpack[OptionalArguments]
    ) -> Tensor | tuple[Tensor, Tensor]:
        tensors, arguments, heads = self._agreed_inputs(q, k, v, layout, **options)
        out, states, *_ = torch.ops.seqpar.linear_attention(*tensors, *arguments)
        return returned(out, states if arguments.return_state else None, q.dim() == 4, heads)

    def preparation(
        self,
        *,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_heads: int | None = None,
        device: torch.device | str | None = None,
        backward: bool = True,
        **options: Unpack[PreparedOptions],
    ) -> Preparation:
        """Return a function that builds the tables of a layout ahead of its first call.

        It is used like `preparation` of softmax attention. Tables do not depend on decays, beta or
        scales.

        Args:
            heads, kv_heads: the number of query heads, and of states, by default the same.
            head_dim: the head dim of q and k.
            dtype: the dtype of q, k and v.
            device: the device of q, k and v. Default: the current GPU, if there is one and the
                group can send from it, otherwise the CPU.
            backward: whether calls have a backward.
            options: `value_dim` (by default `head_dim`), `batch` (1), `initial_state` (whether
                there are any), and `causal` and `return_state` as in a call.

        Raises:
            ValueError: if an argument is wrong. The message names it.
        """
        strategy, kv_heads = self._bound.strategy, heads if kv_heads is None else kv_heads
        described = described_call(
            self._bound, dtype, device, backward, batch=options.pop("batch", 1), heads=heads,
            kv_heads=kv_heads, dim=head_dim, value_dim=options.pop("value_dim", head_dim),
        )  # fmt: skip
        recurrent = strategy.family == "recurrent"
        if heads % kv_heads and not (recurrent and kv_heads % heads == 0):
            expected = f"a multiple {'or a divisor ' * recurrent}of kv_heads, {kv_heads}"
            raise ValueError(f"heads must be {expected}, got {heads}")
        flags: dict[str, Any] = {
            name: as_bool(name, options.pop(name, default))  # type: ignore[misc]
            for name, default in (
                ("causal", True),
                ("initial_state", False),
                ("return_state", False),
            )
        }
        if recurrent and not flags["causal"]:
            raise ValueError("causal must be True for recurrent layers, got False")
        if options:
            raise TypeError(f"preparation got unexpected arguments: {', '.join(options)}")
        forced = current_backend(strategy.family)
        inputs = empty_inputs(described["shape"], 0, described["device"])
        return LinearPreparation(
            **described,
            **flags,
            strategy=strategy,
            backend=strategy.default_backend(inputs) if forced == DEFAULT else forced,
        )

    def _to_call(self, tensors: OperatorTensors, arguments: CallArguments) -> ResolvedCall:
        *inputs, initial = tensors
        strategy, comm = self._bound.strategy, self._bound.comm
        return strategy.resolve(comm, arguments, Inputs(*inputs), initial)  # type: ignore[arg-type]

    def _operator_inputs(
        self, q: Tensor, k: Tensor, v: Tensor, layout: Layout, **options: Unpack[OptionalArguments]
    ) -> tuple[OperatorTensors, CallArguments, HeadPlacement]:
        strategy, decay_heads = self._bound.strategy, {"head": -1, "key": -2}
        of_states = strategy.family == "linear"
        head_dims = {
            "q": (q, -2),
            "k": (k, -2),
            "v": (v, -2),
            "log_decay": (options.get("log_decay"), decay_heads.get(self._decay or "", 0)),
            "beta": (options.get("beta"), -1),
            "initial_state": (options.get("initial_state"), -3),
            "scale": (options.get("scale", 1.0), 0),
        }
        (q, k, v, log_decay, beta, initial, scale), heads = local_heads(head_dims)
        check_tensor("q", q)
        q, scale = fold_scale("scale", q, scale)
        batched = q.dim() == 4
        others = {} if of_states else {"log_decay": log_decay}  # which may be on the CPU
        q, k, v = prepare_operands(q, k, v, **others, beta=beta, initial_state=initial)
        check_layouts(layout=layout)
        causal = as_bool("causal", options.get("causal", True))
        sizes = sizes_of(layout._sizes[self.rank % layout.ranks])
        states_in = sizes.continued if initial is None else sizes.spans
        arguments = CallArguments(
            layout=layout._handle,
            states_in=states_in if causal else sizes.runs,
            documents=sizes.documents,
            strategy=self._key,
            backend=current_backend(strategy.family),
            causal=causal,
            scale=as_float("scale", scale),
            return_state=as_bool("return_state", options.get("return_state", False)),
        )
        if log_decay is not None and self._decay == "constant":
            if of_states:  # another device would mislead the operator's dispatch
                check_tensor("log_decay", log_decay, q.device, or_cpu=True)
            if log_decay.requires_grad and torch.is_grad_enabled():
                raise ValueError("log_decay must not require a gradient: a constant one has none")
            refuse_tangents(log_decay=log_decay)
        elif log_decay is not None and not batched:
            log_decay = log_decay[None]
        if beta is not None and not batched:
            beta = beta[None]
        if initial is not None:
            initial = batch_second(initial, batched, strategy.state_dims)
        return (q, k, v, log_decay, beta, initial), arguments, heads
