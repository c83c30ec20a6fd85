"""The loss of all ranks' tokens, and its gradient for every parameter on every rank.

During a call of the model, its modules hold outputs of an autograd function in place of their
parameters. Its backward sums complete gradients over the ranks, so the parameter, its hooks and
`torch.autograd.grad` get sums only. Terms that use a parameter outside of the model's call, such as
a penalty of the weights, are equal on all ranks, and are not summed.

DDP and FSDP average instead. The loss's gradient is then multiplied by the number of ranks, and the
sums of parameters that DDP and FSDP leave alone are divided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from seqpar.comm.averaging import Averaging, like, local_part
from seqpar.comm.messages.exchange import Comm
from seqpar.core.torch_private import (
    at_end_of_backward,
    in_backward,
    is_compiled,
    parameters_in,
    put_tensor,
)
from seqpar.integrations.huggingface.loss.outputs import tensors_in, with_tensors
from seqpar.integrations.huggingface.model.layers import Uncopied

_BUCKET_ELEMENTS = 1 << 24  # summed in one all-reduce
_KEY = "seqpar"  # key in a graph node's metadata, for the Averaging of its call
_LOCAL = "where its gradient would be of one rank's tokens"
_NO_TOTAL = (
    "loss must be the model's own, outputs.loss, or what sp.total returns: a loss of one rank's "
    "tokens, or one that each rank makes of unsharded outputs, has other gradients on each rank"
)
_REENTRANT = (
    "use_reentrant must be False for a checkpoint around the model's call: autograd's graph does "
    "not show that a loss depends on the outputs"
)

Place = tuple[nn.Module, str, Tensor]  # a module, a parameter's name in it, the parameter


class LossOfRanks(torch.autograd.Function):
    """The sum of all ranks' losses, with the same bits on every rank."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, gradients: ModelGradients, averaged: bool, outputs: list[Any]
    ) -> Tensor:
        comm = gradients.comm
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.scale = gradients, comm.size if averaged else 1
        ctx.outputs = outputs
        ctx.models = dict.fromkeys([gradients, *(x.gradients for x in outputs)])
        parts = comm.all_gather(local.detach().reshape(1).to(comm.device), label="loss")
        return torch.stack(parts).sum().to(local.device).to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if gradient is None:  # DDP passes all outputs through one node, unused ones too
            return None, None, None, None
        for gradients in ctx.models:
            gradients.begin_backward(ctx.scale, ctx.outputs)
        ctx.gradients.check_scale(gradient)
        return gradient * ctx.scale, None, None, None


class _Output(torch.autograd.Function):
    """An output that takes gradients only from a loss of all ranks, or from the model's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: ModelGradients) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.recomputed = gradients, in_backward()
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        if gradient is not None:
            ctx.gradients.check_output(ctx)
        return gradient, None


class _OverRanks(torch.autograd.Function):
    """Tensors that are equal on all ranks but used differently: backward sums their gradients."""

    # The first `tied` tensors pass through. A block's input does, so that backward runs on every
    # rank, right after the block's, even where no token reached the block's trained experts.

    @staticmethod
    def forward(
        ctx: Any, gradients: ModelGradients, tied: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.tied, ctx.tensors = gradients, tied, tensors[tied:]
        return tuple(x.detach() for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        own: ModelGradients = ctx.gradients
        sums = own.sum_over_ranks(ctx.tensors, gradients[ctx.tied :])
        return None, None, *gradients[: ctx.tied], *sums


# Nodes whose tensors refuse one rank's losses already. Those of `_OverRanks` do not: transformers
# returns the tied input of the first block as hidden_states[0].
_GUARDED = {f"{x.__name__}Backward" for x in (LossOfRanks, _Output)}


class ModelGradients(Uncopied):
    """Sums the gradients of an enabled model's parameters that DDP and FSDP do not average.

    Between `begin_call` and `end_call`, modules hold other tensors in place of their parameters, as
    do modules that a checkpoint or a user calls with the model's outputs. The gradients of
    `blocks`, which each call of the model calls once, are summed right after their backward, all
    others at the end.
    """

    def __init__(
        self, model: nn.Module, comm: Comm, blocks: Iterable[nn.Module], check_ranks: bool
    ) -> None:
        self.comm, self._check_ranks = comm, check_ranks
        self._model, self._blocks = model, set(blocks)
        self._last = Averaging()  # who averages, as found in the last call with gradients
        self._in_call = self._in_module = False
        self._checked_hooks: int | None = None  # number of users' hooks when outputs were checked
        self._waiting: dict[nn.Module, list[Place]] = {}  # for blocks that wait for their call
        self._replaced: list[tuple[Place, Tensor]] = []
        self._scale: int | None = None  # factor of the loss whose backward is running
        self._before_backward = False  # whether no backward has begun since the last call
        self._counted: set[Any] = set()  # output nodes on which the running loss depends
        self._left_local: list[Tensor] = []  # have gradients that DDP did not average
        self._step_hook: RemovableHandle | None = None  # only while there are such gradients
        self._modules = {x for x in model.modules() if x is not model}
        self._handles = [
            x.register_forward_pre_hook(self._enter, with_kwargs=True) for x in self._modules
        ]

    def begin_call(self, averaging: Averaging, whole: bool) -> None:
        """Replace parameters for a call of the model; with `whole`, also those of blocks."""
        self.end_call()  # in case a call was interrupted
        if not torch.is_grad_enabled() or self.comm.size == 1:
            return
        if not in_backward():
            self._forget_backward()  # in case a backward was interrupted
        if self._scale is None:  # otherwise a checkpoint around the call computes it again
            self._last, self._before_backward = averaging, True
        groups, others = self._grouped()
        for block in list(groups):
            if whole or is_compiled(block):
                self._replace(groups.pop(block), (), {})
            elif _recomputes_within(block):
                self._check_recomputed(block)
                groups.pop(block)
        self._replace(others, (), {})
        self._waiting, self._in_call = groups, True

    def end_call(self) -> None:
        self._restore()
        self._in_call = self._in_module = False
        self._waiting = {}

    def watched(self, outputs: Any) -> Any:
        """Return a call's outputs, which refuse gradients except from a loss of all ranks."""
        if self.comm.size == 1 or not torch.is_grad_enabled():
            return outputs
        known: dict[int, Tensor] = {}

        def watched(x: Tensor, _: str) -> Tensor:
            if x.grad_fn is None or x.grad_fn.name() in _GUARDED:
                return x
            if id(x) not in known:
                known[id(x)] = _Output.apply(x, self)
                _mark(known[id(x)], self._last)
            return known[id(x)]

        return with_tensors(outputs, watched)

    def check_outputs(self, outputs: Any) -> None:
        """Raise a ValueError if outputs depend on trainable tensors that a user's hook brought."""
        # Their gradients would not be summed. The check follows the graph in the first call and
        # when the number of hooks has changed, but not under FSDP1, where flat parameters look the
        # same.
        if self.comm.size == 1 or not torch.is_grad_enabled() or self._last.flattened:
            return
        hooks = sum(map(_patches, self._modules))
        if hooks == self._checked_hooks:
            return
        names = {id(x): f"its {name} itself" for name, x in self._model.named_parameters()}
        averaged, checkpoints = self._last.leaves(), any(map(_makes_leaves, self._modules))
        for x in _reached(outputs)[1]:
            embeds = checkpoints and not isinstance(x, nn.Parameter)
            if id(x) not in averaged and not embeds:
                used = names.get(id(x), f"a tensor {tuple(x.shape)} that is not its own")
                how = "make it a parameter of a module in the model, and read it there in each call"
                raise ValueError(f"model must not use {used} in a hook, {_LOCAL}: {how}")
        self._checked_hooks = hooks

    def spread(self, batch: Any) -> Any:
        """Return a whole batch, whose tensors get the gradients of all ranks' tokens."""
        if not isinstance(batch, Mapping) or self.comm.size == 1 or not torch.is_grad_enabled():
            return batch
        own = {k: x for k, x in batch.items() if isinstance(x, Tensor) and x.requires_grad}
        if not own:
            return batch
        tensors = _OverRanks.apply(self, 0, *own.values())
        return dict(batch) | dict(zip(own, tensors, strict=True))

    def total(self, local: Tensor) -> Tensor:
        reached, leaves, nodes = _reached(local)
        if not reached and any(x.name() == "CheckpointFunctionBackward" for x in nodes):
            raise ValueError(_REENTRANT)
        averaged = any(_call_of(x).averaged for x in reached) if reached else self._last.averaged
        if leaves and self.comm.size > 1:
            self._check_leaves(leaves, averaged)
        if any(x.gradients.comm is not self.comm for x in reached):
            raise ValueError("loss must be of models that are enabled on the same group")
        return self._total(local, averaged, reached)

    def total_of_model(self, local: Tensor) -> Tensor:
        return self._total(local, self._last.averaged, [])

    def begin_backward(self, scale: int, outputs: list[Any]) -> None:
        """Note that a backward runs: of a loss of all ranks, times `scale`, from these outputs."""
        if self.comm.size > 1 and torch.is_grad_enabled():
            reason = "gradients of gradients are not computed over ranks"
            raise ValueError(f"create_graph must be False: {reason}")
        if self._scale not in (None, scale):
            reason = "DDP or FSDP average the gradients of some calls of the model, and not of all"
            raise ValueError(f"loss must be of calls whose gradients are averaged alike: {reason}")
        self._last.check_backward(first=self._before_backward or self._scale is not None)
        if self._scale is None:
            self._scale, self._before_backward = scale, False
            at_end_of_backward(self._end_backward)
        self._counted.update(outputs)

    def check_scale(self, gradient: Tensor) -> None:
        """Compare the ranks' factors of the loss, 8 bytes to each rank, if ranks are checked."""
        if not self._check_ranks or self.comm.size == 1:
            return
        own = gradient.detach().reshape(1).double().to(self.comm.device)
        factors = torch.cat(self.comm.all_gather(own, label="loss scale"))
        differ = (factors - factors[0]).abs() > 1e-3 * factors[0].abs()
        if differ.any():  # not where they are NaN, as a scaler of gradients may make them
            values = enumerate(factors.tolist())
            listed = ", ".join(f"rank {rank} has {x:.6g}" for rank, x in values)
            raise ValueError(f"loss must be multiplied by the same number on all ranks: {listed}")

    def check_output(self, node: Any) -> None:
        if self._scale is None or node not in self._counted:
            raise ValueError(_REENTRANT if node.recomputed else _NO_TOTAL)

    def remove(self) -> None:
        self.end_call()
        self._note_local_gradients([])
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def sum_over_ranks(
        self, tensors: tuple[Tensor, ...], gradients: tuple[Tensor | None, ...]
    ) -> list[Tensor | None]:
        """Return the sums of all ranks' gradients; None for tensors without a gradient anywhere."""
        # Every rank sends each gradient, or zeros, and whether it has one.
        if self._scale is None:
            raise ValueError(_NO_TOTAL)
        sums: list[Tensor | None] = [None] * len(tensors)
        for bucket in _buckets(tensors):
            own = [gradients[i] is not None for i in bucket]
            parts = [_dense(tensors[i], gradients[i]).reshape(-1) for i in bucket]
            shown = parts[0].new_ones(len(bucket))
            if not all(own):
                shown = shown * torch.tensor(own, dtype=shown.dtype).to(shown.device)
            summed = sum_of_ranks(torch.cat([*parts, shown]), self.comm, self._scale)
            *totals, anywhere = summed.split([*map(Tensor.numel, parts), len(bucket)])
            present = own if all(own) else anywhere.bool().tolist()
            for i, total, known in zip(bucket, totals, present, strict=True):
                if known:
                    x = tensors[i]
                    sums[i] = like(total.view(local_part(x).shape), x)
        return sums

    def _end_backward(self) -> None:
        self._forget_backward()
        self._note_local_gradients(self._last.left_local())
        at_end_of_backward(self._last.check_averaged)  # after DDP

    def _note_local_gradients(self, parameters: list[Tensor]) -> None:
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        self._left_local = parameters
        if parameters:
            self._step_hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        left = {id(x) for x in self._left_local if x.grad is not None}
        if any(id(x) in left for group in optimizer.param_groups for x in group["params"]):
            why = "the last backward ran in DDP's no_sync, and gradients are of one rank's tokens"
            way_out = "leave no_sync for the last forward and backward before a step"
            raise ValueError(f"optimizer must not step: {why}; {way_out}")

    def _forget_backward(self) -> None:
        self._scale = None
        self._counted.clear()

    def _total(self, local: Tensor, averaged: bool, outputs: list[Any]) -> Tensor:
        total: Tensor = LossOfRanks.apply(local, self, averaged, outputs)
        _mark(total, self._last)
        return total

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.comm.size == 1:
            return None
        if self._in_call:
            waiting = self._waiting.pop(module, None)
            return None if not waiting else self._replace(waiting, args, kwargs)
        if self._in_module or module not in self._modules:
            return None
        self._in_module = True

        def leave(*_: Any) -> None:
            handle.remove()
            self._in_module = False
            self._restore()

        handle = module.register_forward_hook(leave, always_call=True)
        of_ranks = in_backward() or _reached([args, kwargs])[0]
        return self._replace(self._places(module), args, kwargs) if of_ranks else None

    def _grouped(self) -> tuple[dict[nn.Module, list[Place]], list[Place]]:
        groups: dict[nn.Module, list[Place]] = {}
        others: list[Place] = []
        owners: dict[int, nn.Module | None] = {}
        places: list[Place] = []
        for module, block in _modules(self._model, self._blocks, None):
            for place in self._own_places(module):
                places.append(place)
                if owners.setdefault(id(place[2]), block) is not block:
                    owners[id(place[2])] = None
        for place in places:
            owner = owners[id(place[2])]
            (others if owner is None else groups.setdefault(owner, [])).append(place)
        return groups, others

    def _places(self, module: nn.Module) -> list[Place]:
        return [place for x in module.modules() for place in self._own_places(x)]

    def _own_places(self, module: nn.Module) -> Iterator[Place]:
        for name, x in parameters_in(module).items():
            # Another enabled model that shares the module may have replaced the parameter already.
            if x is None or not x.requires_grad or _is_over_ranks(x.grad_fn):
                continue
            if not self._last.has(module, name, x):
                yield module, name, x

    def _replace(self, places: list[Place], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not places:
            return None
        parameters = list({id(x): x for _, _, x in places}.values())
        name = "hidden_states"
        inputs = args[:1] or (kwargs.get(name),)
        tied = int(isinstance(inputs[0], Tensor) and inputs[0].is_floating_point())
        outputs = _OverRanks.apply(self, tied, *inputs[:tied], *parameters)
        _mark(outputs[0], self._last)
        known = {id(x): y for x, y in zip(parameters, outputs[tied:], strict=True)}
        for module, own_name, x in places:
            put_tensor(module, own_name, known[id(x)])
            self._replaced.append(((module, own_name, x), known[id(x)]))
        if not tied:
            return None
        if args:
            return (outputs[0], *args[1:]), kwargs
        return args, kwargs | {name: outputs[0]}

    def _restore(self) -> None:
        for (module, name, x), used in self._replaced:
            if parameters_in(module).get(name) is used:  # FSDP may have replaced it
                put_tensor(module, name, x)
        self._replaced.clear()

    def _check_recomputed(self, block: nn.Module) -> None:
        for _, name, _ in self._own_places(block):
            kind = type(block).__name__
            reason = f"a {kind} uses its {name} itself, and not a module in it"
            raise ValueError(f"use_reentrant must be False for gradient checkpointing: {reason}")

    def _check_leaves(self, leaves: list[Tensor], averaged: bool) -> None:
        names = {id(x): name for name, x in self._model.named_parameters()}
        own = {id(x) for _, _, x in self._places(self._model)}
        for x in leaves:
            if id(x) in own or not averaged:
                used = names.get(id(x), f"a tensor {tuple(x.shape)} that is not the model's")
                what = f"loss must not depend on {used} outside of the model's call"
                how = "use it in a module's call within the model that you enable"
                raise ValueError(f"{what}, {_LOCAL}: {how}")


def sum_of_ranks(x: Tensor, comm: Comm, divisor: int) -> Tensor:
    """Return all ranks' sum (N,) over `divisor`, in rank order, by 2·(P − 1)/P·N sent elements."""
    parts = [part.contiguous() for part in x.tensor_split(comm.size)]
    call = comm.call()
    call.join(x.device)
    own = parts[comm.rank]
    others = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]
    sends = [(peer, parts[peer]) for peer in comm.peers]
    recvs = [(peer, others[peer]) for peer in comm.peers]
    call.exchange(sends, recvs, label="gradients").wait()
    wide = torch.promote_types(x.dtype, torch.float32)
    total = sum(others[1:], others[0].to(wide))
    if divisor != 1:
        total = total / divisor
    parts[comm.rank] = total.to(x.dtype)
    sends = [(peer, parts[comm.rank]) for peer in comm.peers]
    recvs = [(peer, parts[peer]) for peer in comm.peers]
    call.exchange(sends, recvs, label="gradients", step=1).wait()
    return torch.cat(parts)


def _dense(x: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(local_part(x))
    local = local_part(gradient)
    return local if local.layout == torch.strided else local.to_dense()


def _buckets(tensors: tuple[Tensor, ...]) -> list[list[int]]:
    buckets: list[list[int]] = []
    size = 0
    for i, x in enumerate(tensors):
        last = tensors[buckets[-1][-1]] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (x.dtype, x.device)
        if not alike or size + x.numel() > _BUCKET_ELEMENTS:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += x.numel()
    return buckets


def _modules(
    module: nn.Module, blocks: set[nn.Module], block: nn.Module | None
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    block = module if block is None and module in blocks else block
    yield module, block
    for child in module.children():
        yield from _modules(child, blocks, block)


def _recomputes_within(block: Any) -> bool:
    """Return whether a block's forward is a reentrant checkpoint, without hooks in backward."""
    function = vars(block).get("_gradient_checkpointing_func")
    if function is None or not (getattr(block, "gradient_checkpointing", False) and block.training):
        return False
    options = function.keywords if isinstance(function, partial) else {}
    return bool(options.get("use_reentrant", True))


def _patches(x: nn.Module) -> int:
    own = vars(x)
    return len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"]) + ("forward" in own)


def _makes_leaves(x: nn.Module) -> bool:
    """Return whether a hook of transformers or PEFT makes outputs leaves for checkpoints."""
    hooks = vars(x)["_forward_hooks"].values()
    return any(getattr(f, "__name__", "").startswith("make_inputs_require_grad") for f in hooks)


def _mark(x: Tensor, call: Averaging) -> None:
    node: Any = x.grad_fn
    if node is not None:
        node.metadata[_KEY] = call


def _call_of(node: Any) -> Any:
    return node.metadata.get(_KEY)


def _is_over_ranks(node: Any) -> bool:
    return node is not None and node.name() == f"{_OverRanks.__name__}Backward"


def _reached(nested: Any) -> tuple[list[Any], list[Tensor], set[Any]]:
    """Return the nodes of calls on which tensors depend, and leaves and all nodes outside."""
    reached: list[Any] = []
    tensors = [x for _, x in tensors_in(nested)]
    leaves = [x for x in tensors if x.requires_grad and x.grad_fn is None]
    nodes = [x.grad_fn for x in tensors if x.grad_fn is not None]
    known = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        followed = node.next_functions
        if _call_of(node) is not None:
            reached.append(node)
            followed = followed[: getattr(node, "tied", 0)]  # a module's inputs, not parameters
        elif _is_over_ranks(node):
            followed = ()  # its inputs are tensors of a batch
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
        for other, _ in followed:
            if other is not None and other not in known:
                known.add(other)
                nodes.append(other)
    return reached, leaves, known
