"""The loss of all ranks' tokens, and the average of its gradients over the ranks.

The loss of a group of ranks is the sum of the losses of its ranks. Backward on a rank computes only
that part of the gradient that flows through the rank's own tokens, and multiplies it by the number
of ranks. The average of these results over the ranks is therefore the gradient of the group's loss.
DDP or FSDP computes the average if it wraps the model, and otherwise `average_gradients` does. A
term that is equal on all ranks, such as a penalty of the weights, also has equal gradients on all
ranks. Averaging does not change these gradients.

`LossOfRanks` computes the sum of losses. The rest of this file refuses uses that would silently
give wrong gradients:

* `_Output` is a node behind each output of the model. In backward, it refuses the gradient of a
  loss of one rank's tokens.
* `_check_leaves` refuses a trainable tensor that is not a parameter of the model, because nothing
  averages its gradient.
* `_LOCAL` and `_check_step` refuse a step of an optimizer if its gradients were not averaged.
* `Averaging`, in `seqpar.comm.averaging`, finds the wrappers, and refuses wrappers that do not
  average over the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from seqpar.comm.averaging import Averaging, like, local_part, placed_as, sum_of_ranks
from seqpar.comm.messages.comm import Comm
from seqpar.core.torch_private import (
    at_end_of_backward,
    ddp_node,
    forward_hooks,
    in_backward,
    version_of,
)
from seqpar.integrations.huggingface.loss.outputs import with_tensors
from seqpar.integrations.huggingface.model.layers import Uncopied

# Most elements that one exchange averages, unless a single tensor has more.
_BUCKET_ELEMENTS = 1 << 24
_NO_TOTAL = (
    "loss must be the model's own, outputs.loss, or what sp.total returns: a loss of one rank's "
    "tokens, or one that each rank makes of unsharded outputs, has different gradients on each rank"
)
_TOTAL = "_seqpar_total"  # marks a loss of all ranks, also where autograd records no graph
_TWICE = (
    "loss must be this rank's part of a loss, got a loss of all ranks: outputs.loss and results of "
    "sp.total are already sums over the ranks; add them to what sp.total returns"
)
_REENTRANT = (
    "use_reentrant must be False for a checkpoint around the model's call: autograd's graph does "
    "not show that a loss depends on the outputs"
)
_AVERAGE = "call sp.average_gradients() after backward"


class LossOfRanks(torch.autograd.Function):
    """The sum of all ranks' losses, with the same bits on every rank.

    Backward multiplies the gradient by the number of ranks, because the gradients are afterwards
    averaged over the ranks, not summed.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, gradients: ModelGradients, outputs: list[Any]) -> Tensor:
        comm = gradients.comm
        ctx.set_materialize_grads(False)
        ctx.gradients, ctx.outputs = gradients, outputs
        ctx.models = dict.fromkeys([gradients, *(x.gradients for x in outputs)])
        own = local.detach().reshape(1)
        if comm.size == 1:  # the loss can be on the meta device, from which nothing can be sent
            return own.clone()[0]
        parts = comm.all_gather(own.to(comm.device), label="loss")
        return torch.stack(parts).sum().to(local.device).to(local.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None]:
        # DDP passes all outputs through one node, also outputs without a gradient.
        if gradient is None:
            return None, None, None
        for gradients in ctx.models:
            gradients.begin_backward(ctx)
        ctx.gradients.check_scale(gradient)
        return gradient * ctx.gradients.comm.size, None, None


class _Output(torch.autograd.Function):
    """An output of the model that refuses a gradient if the loss was not summed over the ranks.

    The class is a node of autograd's graph. The backward of every loss that depends on the output
    reaches this node. `check_output` then finds out whether the loss is a `LossOfRanks`.
    """

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


class _WholeBatch(torch.autograd.Function):
    """Tensors of a whole batch that require gradients, such as embeddings.

    Every rank has the whole tensors, and computes a gradient for its own tokens only. In backward,
    this node averages the gradients over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, comm: Comm, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.comm, ctx.tensors = comm, tensors
        return tuple(x.detach() for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *average_over_ranks(ctx.tensors, gradients, ctx.comm)


# Names of autograd nodes of `LossOfRanks` and `_Output`.
_LOSS, _OUTPUT = (f"{x.__name__}Backward" for x in (LossOfRanks, _Output))
_GUARDED = {_LOSS, _OUTPUT}


# The state of each parameter of a model without a wrapper. Between backward and `average`, the
# value is the id of the parameter's gradient and the version counter of the gradient, which show
# whether the gradient was replaced or clipped. Otherwise the value is None. All models share the
# table, because a parameter can belong to several models.
_LOCAL = WeakTensorKeyDictionary()


def _note_gradient(x: Tensor) -> None:
    _LOCAL[x] = _written(x.grad)


def _check_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raise a ValueError if the gradients in a step of an optimizer were not averaged over the
    ranks.

    Torch calls this function before and after each step of every optimizer.
    """
    for x in (x for group in optimizer.param_groups for x in group["params"] if x in _LOCAL):
        reason = "gradients are of one rank's tokens"
        if in_backward():
            way_out = f"wrap the model in DDP or FSDP, or {_AVERAGE} and step then"
            raise ValueError(f"optimizer must not step in backward: {reason}; {way_out}")
        if (noted := _LOCAL[x]) and x.grad is not None and id(x.grad) == noted[0]:
            raise ValueError(f"optimizer must not step: {reason}; {_AVERAGE}")


@cache
def _check_steps() -> None:
    register_optimizer_step_pre_hook(_check_step)
    register_optimizer_step_post_hook(_check_step)


class ModelGradients(Uncopied):
    """Records what averages the gradients of an enabled model, and whether that has happened.

    A training step calls these methods in order: `begin_call`; `watched` for the outputs; `total`
    or `total_of_model` for the loss; `begin_backward`; `end_backward`; and, if neither DDP nor FSDP
    wraps the model, `check_unchanged` and `average`.
    """

    def __init__(self, model: nn.Module, comm: Comm, check_ranks: bool) -> None:
        self.comm, self._check_ranks, self._model = comm, check_ranks, model
        self._averaging = Averaging()  # the wrappers of the last call with gradients
        self._checked: Averaging | None = None  # the wrappers whose parameters were checked
        self._running = False  # whether the backward of a loss of all ranks is running
        self._before_backward = False  # whether no backward has begun since the last call
        # Nodes of outputs on which the loss depends whose backward is running.
        self._counted: set[Any] = set()
        self._hooks: dict[Tensor, RemovableHandle] = {}  # handles of `_note_gradient`, by parameter

    def begin_call(self, averaging: Averaging) -> None:
        if not torch.is_grad_enabled() or self.comm.size == 1:
            return
        if not in_backward():
            self.end_backward()  # an earlier backward was interrupted
        if not self._running:  # a checkpoint repeats the call in backward
            self._averaging, self._before_backward = averaging, True

    def watched(self, outputs: Any) -> Any:
        """Return the outputs of a call as tensors that raise an error in backward if the loss was
        not summed over the ranks.
        """
        if self.comm.size == 1 or not torch.is_grad_enabled():
            return outputs
        known: dict[int, Tensor] = {}

        def watched(x: Tensor, _: str) -> Tensor:
            if x.grad_fn is None or x.grad_fn.name() in _GUARDED:
                return x
            if id(x) not in known:
                known[id(x)] = _Output.apply(x, self)
            return known[id(x)]

        return with_tensors(outputs, watched)

    def of_whole_batch(self, batch: Any) -> Any:
        """Return a whole batch with `_WholeBatch` around tensors that require gradients."""
        if not isinstance(batch, Mapping) or self.comm.size == 1 or not torch.is_grad_enabled():
            return batch
        own = {k: x for k, x in batch.items() if isinstance(x, Tensor) and x.requires_grad}
        if not own:
            return batch
        tensors = _WholeBatch.apply(self.comm, *own.values())
        return dict(batch) | dict(zip(own, tensors, strict=True))

    def total(self, local: Tensor, *, of_whole_batch: bool = False) -> Tensor:
        """Return the sum of all ranks' losses, for a loss of this rank's outputs.

        If `of_whole_batch` is True, every rank has computed the same loss from the gathered outputs
        of all ranks.
        """
        nodes = _nodes(local.grad_fn, local.output_nr, _GUARDED)
        sums = hasattr(local, _TOTAL) or any(x.name() == _LOSS for x in nodes)
        if sums and not of_whole_batch:
            raise ValueError(_TWICE)
        outputs = [x for x in nodes if x.name() == _OUTPUT]
        if not outputs and any(x.name() == "CheckpointFunctionBackward" for x in nodes):
            raise ValueError(_REENTRANT)
        if any(x.gradients.comm is not self.comm for x in outputs):
            raise ValueError("loss must depend only on models that are enabled on one group")
        if self.comm.size > 1:
            owners = dict.fromkeys([self, *(x.gradients for x in outputs)])
            _check_leaves(nodes, owners, "loss must not depend on {}")
        total: Tensor = LossOfRanks.apply(local.reshape(()), self, outputs)
        mark_total(total)
        return total

    def total_of_model(self, local: Tensor) -> Tensor:
        total: Tensor = LossOfRanks.apply(local, self, [])
        return total

    def begin_backward(self, loss: Any) -> None:
        """Begin the backward of a loss that was summed over the ranks. `loss` is the node of this
        loss in autograd's graph.

        After a change of wrappers such as DDP, the first backward checks that the gradient of every
        parameter is averaged.
        """
        if self.comm.size == 1:
            return
        if torch.is_grad_enabled():
            reason = "gradients of gradients are not computed over ranks"
            raise ValueError(f"create_graph must be False: {reason}")
        first = self._before_backward or self._running
        if not self._running:
            self._running, self._before_backward = True, False
            at_end_of_backward(_Backward(self))
            if self._averaging.wrappers:
                # DDP queues work for the end of backward when backward ends. The check must run
                # after this work, so it is also queued at that moment.
                at_end_of_backward(lambda: at_end_of_backward(self._averaging.check_averaged))
                self.remove()
            else:
                self._watch_parameters()
        self._averaging.check_backward(first)
        if self._checked is None or self._checked.wrappers != self._averaging.wrappers:
            self._check_parameters(loss)
            self._checked = self._averaging
        self._counted.update(loss.outputs)

    def end_backward(self) -> None:
        self._running = False
        self._counted.clear()

    def check_scale(self, gradient: Tensor) -> None:
        """Raise a ValueError if ranks have multiplied the loss by different numbers before
        backward.

        Each rank sends 8 bytes to every other rank. With `check_ranks=False`, nothing is checked.
        """
        if not self._check_ranks or self.comm.size == 1:
            return
        own = gradient.detach().reshape(1).double().to(self.comm.device)
        factors = torch.cat(self.comm.all_gather(own, label="loss scale"))
        differ = (factors - factors[0]).abs() > 1e-3 * factors[0].abs()
        if differ.any():  # a NaN is not a difference, because a gradient scaler can produce NaNs
            values = enumerate(factors.tolist())
            listed = ", ".join(f"rank {rank} has {x:.6g}" for rank, x in values)
            raise ValueError(f"loss must be multiplied by the same number on all ranks: {listed}")

    def check_output(self, node: Any) -> None:
        """Raise a ValueError unless the gradient of an output comes from a loss that was summed
        over all ranks.
        """
        if not self._running or node not in self._counted:
            raise ValueError(_REENTRANT if node.recomputed else _NO_TOTAL)

    def check_unchanged(self) -> None:
        if self.comm.size == 1:
            return
        if self._averaging.in_no_sync:
            reason = "the last backward ran in DDP's no_sync, and DDP will average later"
            way_out = "leave no_sync for the last forward and backward before a step"
            raise ValueError(f"gradients must not be averaged now: {reason}; {way_out}")
        for x in self._model.parameters():
            if (noted := _LOCAL.get(x)) and x.grad is not None and _written(x.grad) != noted:
                raise self._changed(x)

    def average(self) -> None:
        if self.comm.size == 1 or self._averaging.wrappers:
            return
        # Parameters that accelerate offloads are on the meta device. While their module runs,
        # accelerate loads copies, whose gradients it drops, so such parameters are never trained.
        parameters = [x for x in self._model.parameters() if x.requires_grad and not x.is_meta]
        gradients = [placed_as(x, x.grad) for x in parameters]
        averages = average_over_ranks(parameters, gradients, self.comm)
        for x, gradient, average in zip(parameters, gradients, averages, strict=True):
            if average is None:
                continue
            if x.grad is None or x.grad is not gradient or x.grad.layout != torch.strided:
                # A copy, because a view would keep the whole message in memory.
                x.grad = average.clone()
            else:
                with torch.no_grad():
                    x.grad.copy_(average)
            if x in _LOCAL:
                _LOCAL[x] = None

    def remove(self) -> None:
        """Remove the hooks on parameters. Optimizers still refuse gradients that were not
        averaged.
        """
        for x, handle in self._hooks.items():
            handle.remove()
            if _LOCAL.get(x) is None:
                _LOCAL.pop(x, None)
        self._hooks.clear()

    def _watch_parameters(self) -> None:
        """Register `_note_gradient` on each trainable parameter.

        Raises a ValueError if a gradient was changed since the last backward, other than by
        zeroing.
        """
        _check_steps()
        for x in self._model.parameters():
            if x.requires_grad and x not in self._hooks:
                self._hooks[x] = x.register_post_accumulate_grad_hook(_note_gradient)
                _LOCAL.setdefault(x, None)
            elif (noted := _LOCAL.get(x)) and (x.grad is None or _written(x.grad) != noted):
                if x.grad is not None and _dense(x, x.grad).any():
                    raise self._changed(x)
                _LOCAL[x] = None  # the gradient was zeroed since the last backward

    def _changed(self, x: Tensor) -> ValueError:
        return ValueError(
            "gradients must not be changed between backward and sp.average_gradients(): that of "
            f"{self.name_of(x)} was clipped or replaced; average first"
        )

    def _check_parameters(self, loss: Any) -> None:
        averaging = self._averaging
        if left_out := averaging.left_out(self._model):
            raise ValueError(
                f"model must not have trainable parameters that {averaging.kinds} leaves out, got "
                f"{', '.join(left_out[:3])}{' and others' * (len(left_out) > 3)}, where gradients "
                "would be of one rank's tokens: wrap the whole model, or freeze them"
            )
        nodes = _nodes(loss, 0, set())
        _check_leaves(nodes, [self, *loss.models], "model must not use {} in its call")

    def own_leaves(self) -> set[int] | None:
        """Return the ids of tensors whose gradients are averaged, or None if they are unknown.

        The ids are unknown under FSDP1, which flattens parameters, and if accelerate offloads
        parameters.
        """
        if self._averaging.flattened or any(x.is_meta for x in self._model.parameters()):
            return None
        if self._averaging.wrappers:
            return self._averaging.leaves()
        return {id(x) for x in self._model.parameters()}

    def name_of(self, x: Tensor) -> str:
        names = {id(y): f"the model's {name}" for name, y in self._model.named_parameters()}
        return names.get(id(x), f"a tensor {tuple(x.shape)} that is not the model's")

    def makes_leaves(self) -> bool:
        """Return whether a hook of transformers or PEFT makes embeddings require gradients."""
        hooks = (f for x in self._model.modules() for f in forward_hooks(x)[1].values())
        names = (getattr(f, "__name__", "") for f in hooks)
        return any(name.startswith("make_inputs_require_grad") for name in names)


class _Backward:
    """A callback that autograd's engine runs after the last node of a backward.

    If the backward raises an error, the engine drops the callback without a call, and `__del__`
    runs instead.
    """

    def __init__(self, gradients: ModelGradients) -> None:
        self._gradients, self._ended = gradients, False

    def __call__(self) -> None:
        self._gradients.end_backward()
        self._ended = True

    def __del__(self) -> None:
        if not self._ended:
            self._gradients.end_backward()
            self._gradients.comm.tell_error(RuntimeError("its backward failed"))


def mark_total(loss: Tensor) -> None:
    setattr(loss, _TOTAL, True)


@torch.no_grad()
def average_over_ranks(
    tensors: Iterable[Tensor], gradients: Iterable[Tensor | None], comm: Comm
) -> list[Tensor | None]:
    """Return each tensor's gradient, averaged over the ranks; None if no rank has a gradient.

    `gradients` are those of `tensors`, in the same order on every rank. A gradient that is None on
    some of the ranks counts as 0 there. Each rank sends 2·(P − 1)/P times the bytes of the
    gradients.
    """
    tensors, gradients = list(tensors), list(gradients)
    averages: list[Tensor | None] = [None] * len(tensors)
    for bucket in _buckets(tensors):
        own = [gradients[i] is not None for i in bucket]
        parts = [_dense(tensors[i], gradients[i]).reshape(-1) for i in bucket]
        shown = parts[0].new_ones(len(bucket))
        if not all(own):
            shown = shown * torch.tensor(own, dtype=shown.dtype).to(shown.device)
        averaged = sum_of_ranks(torch.cat([*parts, shown]), comm, divisor=comm.size)
        *found, anywhere = averaged.split([*map(Tensor.numel, parts), len(bucket)])
        present = own if all(own) else anywhere.bool().tolist()
        for i, average, known in zip(bucket, found, present, strict=True):
            if known:
                x = tensors[i]
                averages[i] = like(average.view(local_part(x).shape), x)
    return averages


def _dense(x: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros_like(local_part(x))
    local = local_part(gradient)
    return local if local.layout == torch.strided else local.to_dense()


def _buckets(tensors: list[Tensor]) -> list[list[int]]:
    """Group the indices of `tensors` into buckets. The tensors of a bucket are averaged by a single
    exchange.

    All tensors of a bucket have the same dtype and device. A bucket with several tensors has at
    most `_BUCKET_ELEMENTS` elements.
    """
    full: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, x in enumerate(tensors):
        bucket, size = filling.get((x.dtype, x.device), ([], 0))
        if bucket and size + x.numel() > _BUCKET_ELEMENTS:
            full.append(bucket)
            bucket, size = [], 0
        filling[x.dtype, x.device] = [*bucket, i], size + x.numel()
    return full + [bucket for bucket, _ in filling.values()]


def _written(gradient: Tensor | None) -> tuple[int, int]:
    assert gradient is not None
    return id(gradient), version_of(local_part(gradient))


def _nodes(root: Any, number: int, ends: set[str]) -> list[Any]:
    """Return the nodes of autograd's graph on which output `number` of the node `root` depends.

    The search stops at nodes whose names are in `ends`, and at `_WholeBatch`.
    """
    ends = ends | {f"{_WholeBatch.__name__}Backward"}
    of_ddp = ddp_node()
    known: dict[tuple[Any, int], None] = {}  # a dict and not a set, for the same order on all ranks
    waiting = [(root, number)]
    while waiting:
        edge = node, number = waiting.pop()
        if node is None or edge in known:
            continue
        known[edge] = None
        if node.name() not in ends:
            following = node.next_functions
            # DDP passes all outputs of a model through one node.
            waiting += following[number : number + 1] if node.name() == of_ddp else following
    return list({node: None for node, _ in known})


def _check_leaves(nodes: list[Any], owners: Iterable[ModelGradients], refusal: str) -> None:
    """Raise a ValueError if nothing averages the gradient of a leaf of autograd's graph.

    `owners` are the models whose parameters are averaged. The error message begins with `refusal`.
    """
    owners = list(owners)
    known = [owner.own_leaves() for owner in owners]
    if any(x is None for x in known):
        return
    averaged = set[int]().union(*(x for x in known if x is not None))
    embeds = any(owner.makes_leaves() for owner in owners)
    for x in (node.variable for node in nodes if hasattr(node, "variable")):
        if id(x) not in averaged and (isinstance(x, nn.Parameter) or not embeds):
            what = refusal.format(owners[0].name_of(x))
            reason = "its gradient would be of one rank's tokens"
            how = "make it a parameter of the model that you enable, and read it there in each call"
            raise ValueError(f"{what}: {reason}; {how}")
