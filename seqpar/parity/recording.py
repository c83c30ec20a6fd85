"""Record one step of a model: its inputs, outputs, losses, gradients and weights.

Hooks on the modules observe outputs and the gradients of outputs. The hooks keep summaries
(`summaries.py`) on the device until the end of the context, so that forward and backward never wait
for the device. Each rank writes its own files and sends nothing.

A *forward* is a call of the whole model. A *call* is a call of one module within a forward.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from seqpar.comm.dtensor import is_dtensor, local_block
from seqpar.comm.messages.comm import Group
from seqpar.comm.plain import members_of
from seqpar.core.arguments import as_path, as_sequence, check_tensor, check_type
from seqpar.core.torch_private import (
    compiled_modules,
    in_backward,
    is_compiled,
    observed_compiled_call,
    without_function_modes,
    wrappers_names,
)
from seqpar.parity.files import check_new, require_safetensors, write_rank
from seqpar.parity.losses import Losses, before_optimizer_steps
from seqpar.parity.sharding import Batch, Order, as_order, batch_of, stated_positions, token_rows
from seqpar.parity.summaries import (
    COLUMNS,
    SIZE_BINS,
    count_sizes,
    summarise,
    summarise_block,
)

MODEL = "(model)"  # the name of the whole model in recordings
_MAX_ROUTER_FEATURES = 512
_ROUTER_NAMES = ("router", "gate")


@contextmanager
def record(
    folder: str | Path,
    model: nn.Module,
    group: Group | None = None,
    layout: object = None,
    tokens: Tensor | None = None,
    full: Sequence[str] = (),
) -> Iterator[Recorder]:
    """Record what a model computes in this context, into a new folder.

    Run exactly one training step, or one call of the model, in the context. Every rank must enter
    the context. When it leaves the context, it writes its own files. Nothing is sent.

    Args:
        folder: the folder to write, which must not exist. All ranks name the same folder.
        model: any module, also if it is compiled, or wrapped in DDP or FSDP2.
        group: the process group or mesh of the ranks that share one sequence. None stands for all
            ranks.
        layout: which tokens each of the P ranks holds. One of these: a `Layout`; "head_tail" (the
            sequence is cut into 2P chunks, and rank c holds chunks c and 2P − 1 − c); "contiguous";
            "striped" (token i is on rank i mod P); or a function of (rank, ranks, tokens) that
            returns positions. By default, `compare` finds the order of tokens from `input_ids` and
            `position_ids`.
        tokens: (T_local,) or (rows, T_local), in place of `layout`. The position of each local
            token in the whole sequence. −1 marks padding, which is not compared.
        full: patterns of module names, such as "layers.3.*". For these modules, complete outputs
            are stored instead of summaries.

    Yields:
        The recorder. If your code never calls `backward` on the loss, pass the loss to the
        recorder's method `loss`.

    Raises:
        ValueError: if an argument is wrong, or if the folder exists.
        ImportError: if safetensors is not installed.
    """
    require_safetensors()
    check_type("model", model, nn.Module)
    path = as_path("folder", folder)
    if tokens is not None:
        check_tensor("tokens", tokens)
    patterns = [str(x) for x in as_sequence("full", full, "patterns")]
    order = as_order(layout, tokens)
    process, members = members_of(group)
    check_new(path, process)
    recorder = Recorder(model, order, tokens, patterns, process, members)
    with recorder.hooks():
        yield recorder
    with without_function_modes():
        write_rank(path, process, *recorder.content())


@dataclass
class _Output:
    description: dict[str, Any]
    summary: Tensor
    gradient: Tensor | None = None
    full: Tensor | None = None
    full_gradient: Tensor | None = None


@dataclass
class Recorder:
    """Observes a model with hooks, and keeps what they have recorded."""

    model: nn.Module
    order: Order
    tokens: Tensor | None
    full: list[str]
    process: int
    members: list[int]
    losses: Losses = field(default_factory=Losses)
    notes: list[str] = field(default_factory=list)
    _outputs: dict[tuple[int, str, int, int], _Output] = field(default_factory=dict)
    _calls: Counter[tuple[int, str, bool]] = field(default_factory=Counter)
    _inputs: list[dict[str, Tensor]] = field(default_factory=list)  # one entry for each forward
    _batch: Batch | None = None
    # Digests of the random state: at the start, and after each call.
    _random: list[str] = field(default_factory=list)
    _gradients: Tensor | None = None
    _gradient_sizes: Tensor | None = None
    _optimizer: dict[str, Any] = field(default_factory=dict)
    _model_loss: Tensor | None = None
    _stated_loss: dict[str, Tensor] = field(default_factory=dict)
    # The class of each module, and the probability with which the module drops elements.
    _hooked: dict[str, tuple[str, float]] = field(default_factory=dict)
    _before: Tensor | None = None
    _hook_handles: list[RemovableHandle] = field(default_factory=list)  # of outputs

    def loss(self, value: Tensor | float, labels: Tensor | int | None = None) -> None:
        """State this rank's loss of the step, and the number of labels by which it was divided."""
        self._stated_loss["value"] = torch.as_tensor(value).detach().double()
        if labels is not None:
            self._stated_loss["labels"] = torch.as_tensor(labels).detach().double()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Observe the model in this context."""
        with without_function_modes():
            self._before = self._summaries(lambda x: x)
            self._random.append(_random_state())
        with ExitStack() as stack:
            stack.callback(self._remove_hooks_of_outputs)
            for name, module in self._observed_modules():
                if name in self._hooked:
                    continue  # a wrapped module returns the same as its wrapper
                self._hooked[name] = type(module).__name__, _drop_probability(module)
                observe = _eager(self._observer(name))
                if is_compiled(module) and type(module) is not compiled_modules():
                    stack.enter_context(observed_compiled_call(module, observe))
                else:
                    hook = module.register_forward_hook(self._as_hook(observe))
                    stack.callback(hook.remove)
            handle = self.model.register_forward_pre_hook(
                _eager(self._begin), with_kwargs=True, prepend=True
            )
            stack.callback(handle.remove)
            stack.enter_context(self.losses.observed(lambda: self._batch))
            stack.enter_context(before_optimizer_steps(self._before_step))
            yield
        if not self._outputs:
            raise ValueError(
                "model: none of its modules returned a tensor within record(); record the module "
                "that the step calls"
            )
        if self._gradients is None:
            self._see_gradients()

    def _remove_hooks_of_outputs(self) -> None:
        """Remove the hooks of outputs.

        An output can be a parameter or an input, which exists longer than the step.
        """
        for handle in self._hook_handles:
            handle.remove()

    def _observed_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that can be observed. Modules inside a compiled module cannot."""
        inside: list[str] = []
        for name, module in self.model.named_modules():
            is_list = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList)
            if is_list or any(name.startswith(prefix) for prefix in inside):
                continue
            if is_compiled(module):
                inside.append(f"{name}." if name else "")
                self.notes.append(f"{_plain(name)}: compiled, so nothing inside it was seen")
            yield _plain(name), module

    def _begin(self, _: nn.Module, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if in_backward():
            return
        self._see_inputs(_named_tensors(self.model, arguments, options))

    def _see_inputs(self, inputs: dict[str, Tensor]) -> None:
        known = None if self.tokens is None else self.tokens.shape[-1]
        if self.tokens is None and self.order is not None:
            known = _count_of(self.order, self.process, self.members)
        batch = batch_of(inputs, known)
        if batch is None and known is not None:
            shapes = {name: tuple(x.shape) for name, x in inputs.items()}
            stated = "layout" if self.tokens is None else "tokens"
            raise ValueError(
                f"{stated} has {known} tokens on this rank, but no input of the model has so many: "
                f"the shapes of the inputs are {shapes}"
            )
        self._batch = batch
        self._inputs.append({name: x.detach().clone() for name, x in inputs.items()})

    def _as_hook(
        self, observe: Callable[[object], None]
    ) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], result: object) -> None:
            if not self._inputs:  # the training loop calls inner modules instead of the model
                self._see_inputs(_named_tensors(module, arguments, {}))
            observe(result)

        return hook

    def _observer(self, name: str) -> Callable[[object], None]:
        def observe(result: object) -> None:
            again = in_backward()  # a checkpoint computes its module again in backward
            if not again:
                self._random.append(_random_state())
            forward = max(0, len(self._inputs) - 1)
            call = self._calls[forward, name, again]
            self._calls[forward, name, again] += 1
            for i, (key, x) in enumerate(_tensors_in(result)):
                known = self._outputs.get((forward, name, call, i))
                if again and (known is None or not x.requires_grad):
                    continue
                if known is None:
                    known = self._see(name, key, forward, call, x)
                    self._outputs[forward, name, call, i] = known
                if x.requires_grad:
                    handle = x.register_hook(_eager(self._gradient_hook(known)))
                    self._hook_handles.append(handle)
            if name == MODEL and not again:
                loss = getattr(result, "loss", None)
                if isinstance(loss, Tensor) and loss.numel() == 1 and not is_dtensor(loss):
                    self._model_loss = loss.detach().double()

        return observe

    def _see(self, name: str, key: str, forward: int, call: int, x: Tensor) -> _Output:
        rows, by_token = self._rows(x)
        is_full = any(fnmatchcase(name, pattern) for pattern in self.full)
        last = name.rsplit(".", 1)[-1]
        is_router = any(word in last for word in _ROUTER_NAMES)
        small = by_token and rows.shape[-1] <= _MAX_ROUTER_FEATURES
        description = {
            "name": name,
            "output": key,
            "forward": forward,
            "call": call,
            "class": self._hooked[name][0],
            "drops": self._hooked[name][1],
            "draws": self._random[-1] != self._random[-2],
            "dtype": str(x.dtype).removeprefix("torch."),
            "shape": list(x.shape),
            "by_token": by_token,
            "features": rows.shape[-1],
            "router": is_router and small,
        }
        kept = rows.detach().clone() if is_full or (is_router and small) else None
        with torch.no_grad():
            return _Output(description, _summary(rows.detach(), by_token), full=kept)

    def _rows(self, x: Tensor) -> tuple[Tensor, bool]:
        """Return a tensor in the shape (rows, tokens, features), and True.

        If no dimension of `x` is the tokens, the tensor is returned unchanged, with False. If `x`
        is a DTensor, its local tensor is returned.
        """
        if is_dtensor(x):
            block = local_block(x)
            x = x.to_local() if block is None else block[0]  # type: ignore[attr-defined]
        rows = None if self._batch is None else token_rows(x, self._batch)
        if rows is not None:
            return rows, True
        return (x if x.dim() else x.reshape(1)), False

    def _gradient_hook(self, output: _Output) -> Callable[[Tensor], None]:
        def see(gradient: Tensor) -> None:
            with torch.no_grad():
                rows, by_token = self._rows(gradient.detach())
                summary = _summary(rows, by_token)
                output.gradient = summary if output.gradient is None else output.gradient + summary
                if output.full is not None:
                    output.full_gradient = rows.clone()

        return see

    def _before_step(self, optimizer: Optimizer) -> None:
        if self._gradients is None:
            self._see_gradients()
        rates = [float(x["lr"]) for x in optimizer.param_groups if "lr" in x]
        steps = [float(x["step"]) for x in optimizer.state.values() if "step" in x]
        self._optimizer.setdefault("learning_rates", []).extend(rates)
        self._optimizer["steps"] = max(steps, default=0.0)

    @without_function_modes()
    def _see_gradients(self) -> None:
        self._gradients = self._summaries(lambda x: x.grad)
        self._gradient_sizes = self._of_blocks(
            lambda x: x.grad, lambda block, _: count_sizes(block), SIZE_BINS
        )

    def _summaries(self, part: Callable[[Tensor], Tensor | None]) -> Tensor:
        return self._of_blocks(part, summarise_block, COLUMNS)

    def _of_blocks(
        self,
        part: Callable[[Tensor], Tensor | None],
        summary: Callable[[Tensor, tuple[int, ...]], Tensor],
        columns: int,
    ) -> Tensor:
        """Return (parameters, columns): the summary of each parameter, from the elements on this
        rank.

        `part` is a function from a parameter to the tensor to be summarised, such as the gradient.
        The summary of a parameter is NaN if `part` returns None, or if the elements of the tensor
        on this rank are not a block.
        """
        found = []
        with torch.no_grad():
            for _, parameter in self._parameters():
                x = part(parameter)
                block = None if x is None else local_block(x.detach())
                if block is None:
                    found.append(torch.full((columns,), torch.nan, dtype=torch.float64))
                else:
                    found.append(summary(*block))
        if not found:
            return torch.zeros(0, columns, dtype=torch.float64)
        return torch.stack([x.cpu() for x in found])

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(_plain(name), x) for name, x in self.model.named_parameters()]

    def _parameter_list(self) -> list[dict[str, Any]]:
        names: dict[int, list[str]] = {}
        for name, x in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(x), []).append(_plain(name))
        found = []
        for name, x in self._parameters():
            block = local_block(x.detach())
            found.append(
                {
                    "name": name,
                    "shape": list(x.shape),
                    "dtype": str(x.dtype).removeprefix("torch."),
                    "offsets": None if block is None else list(block[1]),
                    "tied": [other for other in names[id(x)] if other != name],
                }
            )
        return found

    @without_function_modes()
    def content(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        assert self._before is not None and self._gradients is not None
        assert self._gradient_sizes is not None
        tensors["weights.before"], tensors["gradients"] = self._before, self._gradients
        tensors["gradient sizes"] = self._gradient_sizes
        tensors["weights.after"] = self._summaries(lambda x: x)
        order, positions = stated_positions(
            self.order,
            self.tokens,
            self.members.index(self.process),
            len(self.members),
            self._batch,
        )
        if positions is not None:
            tensors["positions"] = torch.from_numpy(positions)
        for forward, inputs in enumerate(self._inputs):
            for name, x in inputs.items():
                if not x.is_floating_point() and not is_dtensor(x):
                    tensors[f"input.{forward}.{name}"] = x.long()
                elif (rows := self._rows(x))[1]:
                    tensors[f"input.{forward}.{name}"] = _summary(rows[0], True)
        outputs = [self._written(i, x, tensors) for i, x in enumerate(self._outputs.values())]
        seen = {x["name"] for x in outputs}
        labelled = []
        for i, called in enumerate(self.losses.labelled):
            labelled.append({"value": called.value.item(), "labels": int(called.count)})
            if called.tokens is not None:
                tensors[f"labels.{i}"] = called.tokens
        content = {
            "rank": self.process,
            "group": self.members,
            "torch": torch.__version__,
            "order": order,
            "batch": None if self._batch is None else list(self._batch),
            "training": self.model.training,
            "evaluated": [_plain(x) for x, y in self.model.named_modules() if not y.training],
            "forwards": len(self._inputs),
            "inputs": [sorted(x) for x in self._inputs],
            "outputs": outputs,
            "unseen": [name for name in self._hooked if name not in seen],
            "cross_entropy": labelled,
            "backwards": [x.item() for x in self.losses.backwards],
            "model_loss": None if self._model_loss is None else self._model_loss.item(),
            "stated_loss": {name: x.item() for name, x in self._stated_loss.items()},
            "parameters": self._parameter_list(),
            "optimizer": self._optimizer,
            "random": {"start": self._random[0], "drawn": len(set(self._random)) > 1},
            "notes": self.notes,
        }
        return content, {name: x.detach().cpu().contiguous() for name, x in tensors.items()}

    @staticmethod
    def _written(i: int, output: _Output, tensors: dict[str, Tensor]) -> dict[str, Any]:
        named = {
            "summary": output.summary,
            "gradient": output.gradient,
            "full": output.full,
            "full_gradient": output.full_gradient,
        }
        written = {key: f"{key}.{i}" for key, x in named.items() if x is not None}
        tensors |= {written[key]: x for key, x in named.items() if x is not None}
        return output.description | {"tensors": written}


def _plain(name: str) -> str:
    """Return a module's name without the names that wrappers such as DDP add."""
    wrappers = wrappers_names()
    return ".".join(x for x in name.split(".") if x not in wrappers) or MODEL


def _summary(rows: Tensor, by_token: bool) -> Tensor:
    if by_token:
        return summarise(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    return summarise_block(rows)


def _eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that torch.compile does not trace it, and the caller's modes do not
    apply.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(without_function_modes()(function))
    return disabled


def _named_tensors(
    model: nn.Module, arguments: Sequence[Any], options: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors that a call of `model` received, in a dict by the names of the
    arguments.
    """
    inner = model
    while (child := getattr(inner, "module", None)) is not None and isinstance(child, nn.Module):
        inner = child
    names = list(inspect.signature(inner.forward).parameters)
    names += [f"argument{i}" for i in range(len(names), len(arguments))]
    named = dict(zip(names, arguments, strict=False)) | dict(options)
    for x in list(named.values()):
        if isinstance(x, Mapping):  # one argument can contain the whole batch
            named |= {str(key): y for key, y in x.items() if str(key) not in named}
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


def _drop_probability(module: nn.Module) -> float:
    """Return the probability with which a module drops elements or layers, 0 if it drops none."""
    kind = type(module).__name__.lower()
    if not module.training or not ("drop" in kind or "stochasticdepth" in kind):
        return 0.0
    found = (getattr(module, name, None) for name in ("p", "drop_prob", "drop_rate"))
    return max((float(x) for x in found if isinstance(x, float | int)), default=0.0)


def _tensors_in(result: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point and complex tensors of a result, each with its key in the result."""
    if isinstance(result, Tensor):
        if result.is_floating_point() or result.is_complex():
            yield name, result
    elif is_dataclass(result) and not isinstance(result, Mapping | type):
        members = {x.name: getattr(result, x.name) for x in fields(result)}
        yield from _tensors_in(members, name)
    elif isinstance(result, Mapping):
        for key, x in result.items():
            yield from _tensors_in(x, f"{name}.{key}".lstrip("."))
    elif isinstance(result, tuple | list):
        for i, x in enumerate(result):
            yield from _tensors_in(x, f"{name}.{i}".lstrip("."))


def _count_of(order: Order, process: int, members: Sequence[int]) -> int | None:
    tokens_on = getattr(order, "tokens_on", None)
    return None if tokens_on is None else tokens_on(list(members).index(process))


def _random_state() -> str:
    """Return a digest of the states of the random number generators of the CPU and of this GPU."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()[:16]
