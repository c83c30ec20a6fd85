"""Find the parameters whose gradients DDP or FSDP average over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from seqpar.comm.messages.exchange import Comm
from seqpar.core.torch_private import (
    calling_modules,
    check_averaged,
    ddp_parameters,
    fsdp1_ignored,
    fsdp2_groups,
    fsdp2_names,
    fsdp2_tensors,
    gradient_hooks,
    has_hooks,
    returned_by_grad,
)

_RULE = "must average gradients over all ranks of the group"
_HOOKS = "torch.distributed.algorithms."
_OTHER_HOOKS = ("noop_hook", "post_localSGD_hook")  # do not average over all ranks


@dataclass
class Averaging:
    """The parameters of a model that DDP or FSDP average, as found in one call of the model."""

    averaged: bool = False  # whether the gradients of at least one trainable parameter are
    flattened: bool = False  # whether FSDP1 has flattened parameters: a call uses parts of them
    _ddps: list[DistributedDataParallel] = field(default_factory=list)
    _fsdp2: list[object] = field(default_factory=list)
    _by_ddp: list[Tensor] = field(default_factory=list)
    _in_no_sync: list[Tensor] = field(default_factory=list)
    _parameters: set[int] = field(default_factory=set)
    _places: set[tuple[int, str]] = field(default_factory=set)

    def has(self, module: nn.Module, name: str, parameter: Tensor) -> bool:
        """Return whether DDP or FSDP average this parameter, so that seqpar need not sum it.

        A parameter with hooks is an exception. Its hooks run before DDP averages, and need the sum
        over the group. DDP can average this sum again, since it is the same on all ranks.
        """
        if id(parameter) in self._parameters:
            return not has_hooks(parameter)
        return (id(module), name) in self._places

    def left_local(self) -> list[Tensor]:
        """Return the parameters that a DDP in `no_sync` manages and does not average now."""
        return [x for x in self._in_no_sync if not has_hooks(x)]

    def leaves(self) -> set[int]:
        """Return the ids of tensors whose gradients DDP or FSDP2 average, in whichever module."""
        return self._parameters | {id(x) for group in self._fsdp2 for x in fsdp2_tensors(group)}

    def check_backward(self, first: bool) -> None:
        """Raise a ValueError if the backward that runs now does not let DDP average.

        `first` is True if no other backward has begun since the last call of the model.
        """
        if returned_by_grad(self._by_ddp):
            reason = "DDP averages in loss.backward() only"
            raise ValueError(f"torch.autograd.grad must not be given parameters in DDP: {reason}")
        if self._ddps and not first:
            way_out = "add the losses, and call backward() once after the last forward"
            reason = "DDP averages in the first backward after a forward only"
            raise ValueError(f"loss.backward() must not be called again: {reason}; {way_out}")

    def check_averaged(self) -> None:
        """Raise a ValueError if DDP has not averaged in the backward that ends now."""
        for ddp in self._ddps:
            try:
                if not ddp.static_graph:  # a static graph averages later in its first backward
                    check_averaged(ddp)
            except RuntimeError as fault:
                way_out = "set find_unused_parameters=True, and give backward() no inputs"
                reason = f"some got no gradient, and DDP waited for them; {way_out}"
                raise ValueError(f"loss must reach all parameters in DDP: {reason}") from fault

    @classmethod
    def of(cls, root: nn.Module, comm: Comm) -> Averaging:
        """Return the averaging of the running call of a model.

        Looks for DDP and FSDP around the model, at its root and at its parts. Raises a ValueError
        if one of them averages over ranks that do not include the whole group or divides by another
        number, or for a DeepSpeed engine.
        """
        averaging = cls()
        for x in dict.fromkeys([*calling_modules(), *root.modules()]):
            if isinstance(x, DistributedDataParallel):
                averaging._add_ddp(x, comm)
            elif isinstance(x, FullyShardedDataParallel):
                averaging._add_fsdp1(x, comm)
            elif isinstance(x, FSDPModule):
                averaging._add_fsdp2(x, comm)
            elif type(x).__module__.split(".")[0] == "deepspeed":
                reason = "it changes and sums gradients in a way that is not supported"
                raise ValueError(f"model must not be in a DeepSpeed engine: {reason}")
        return averaging

    def _add_ddp(self, ddp: DistributedDataParallel, comm: Comm) -> None:
        _check("DDP", ddp, dist.get_process_group_ranks(ddp.process_group), comm)
        parameters = ddp_parameters(ddp)
        self._parameters |= {id(x) for x in parameters}
        trained = [x for x in parameters if x.requires_grad]
        self._by_ddp += trained
        if ddp.require_backward_grad_sync:
            self._ddps.append(ddp)
        else:
            self._in_no_sync += trained
        self.averaged |= bool(self._by_ddp)

    def _add_fsdp1(self, fsdp: FullyShardedDataParallel, comm: Comm) -> None:
        _check("FSDP", fsdp, dist.get_process_group_ranks(fsdp.process_group), comm)
        ignored = {id(x) for x in fsdp1_ignored(fsdp)}
        self.averaged = self.flattened = True
        for module in fsdp.modules():
            for name, x in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(x) not in ignored:
                    self._places.add((id(module), name))

    def _add_fsdp2(self, module: nn.Module, comm: Comm) -> None:
        for group in fsdp2_groups(module):
            self._fsdp2.append(group)
            mesh = group.mesh_info.mesh.mesh.flatten().tolist()
            _check("FSDP", group, mesh, comm)
            divisor = getattr(group, "gradient_divide_factor", None)
            if divisor is not None and divisor != len(mesh):
                stated = f"set_gradient_divide_factor({divisor}) makes it divide by another number"
                raise ValueError(f"FSDP {_RULE}: {stated}")
            for owner, name in fsdp2_names(group):
                self._places.add((id(owner), name))
                self.averaged |= bool(getattr(owner, name).requires_grad)


def own_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) of the parameters and saved buffers that each rank has whole."""
    modules = list(model.modules())
    has_fsdp = any(isinstance(x, FullyShardedDataParallel | FSDPModule) for x in modules)
    names = set() if has_fsdp else set(model.state_dict(keep_vars=True))
    sharded = [x for x in modules if isinstance(x, FullyShardedDataParallel)]
    skipped = {id(x) for fsdp in sharded for x in fsdp.parameters()}
    named = dict(model.named_parameters()) | {
        name: x for name, x in model.named_buffers() if name in names
    }
    return [
        (name, x)
        for name, x in named.items()
        if id(x) not in skipped and not isinstance(x, DTensor) and not x.is_meta
    ]


def local_part(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def like(local: Tensor, x: Tensor) -> Tensor:
    """Return a local tensor as a DTensor placed like `x`, or itself if `x` is not a DTensor."""
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _check(name: str, wrapped: object, averaged: list[int], comm: Comm) -> None:
    """Raise a ValueError unless gradients are averaged over the group, by hooks known to do so."""
    own = comm.processes
    if not set(own) <= set(averaged):
        stated = f"it averages over ranks {averaged}, and the group has {own}"
        raise ValueError(f"{name} {_RULE}: {stated}")
    for hook in gradient_hooks(wrapped):
        hook_name = getattr(hook, "__name__", type(hook).__name__)
        of_torch = str(getattr(hook, "__module__", None)).startswith(_HOOKS)
        if not of_torch or hook_name in _OTHER_HOOKS:
            reason = f"its comm hook {hook_name} is not one of torch's hooks that average"
            raise ValueError(f"{name} {_RULE}: {reason}")
