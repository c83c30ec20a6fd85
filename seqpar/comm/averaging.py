"""Find the parameters whose gradients DDP or FSDP averages over ranks, and sum other tensors.

`seqpar.integrations.huggingface` checks with this file that each gradient is averaged exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from seqpar.comm.messages.comm import Comm
from seqpar.core.torch_private import (
    calling_modules,
    check_averaged,
    ddp_hooks,
    ddp_parameters,
    fsdp1_hook,
    fsdp1_ignored,
    fsdp2_divisor,
    fsdp2_groups,
    fsdp2_hook,
    fsdp2_names,
    fsdp2_tensors,
)

_RULE = "must average gradients over all ranks of the group"
_HOOKS = "torch.distributed.algorithms."
# Communication hooks of DDP that do not average over all ranks.
_OTHER_HOOKS = ("noop_hook", "post_localSGD_hook")


@dataclass
class Averaging:
    """The DDP and FSDP wrappers that average the gradients of a model, as found during a call.

    Attributes:
        wrappers: the modules of DDP and FSDP1, and the parameter groups of FSDP2.
        flattened: whether a wrapper is FSDP1. With FSDP1, the parameters are views of flat
            parameters during a call.
        in_no_sync: whether DDP's `no_sync` was active, so that DDP averages in a later backward.
    """

    wrappers: list[object] = field(default_factory=list)
    flattened: bool = False
    in_no_sync: bool = False
    _ddps: list[DistributedDataParallel] = field(default_factory=list)
    _by_ddp: set[int] = field(default_factory=set)  # ids of parameters
    _in_fsdp1: set[int] = field(default_factory=set)  # ids of modules
    _ignored_by_fsdp1: set[int] = field(default_factory=set)  # ids of parameters
    # (module id, parameter name). Ids of parameters would not do, because FSDP2 replaces the
    # parameters in each call.
    _by_fsdp2: set[tuple[int, str]] = field(default_factory=set)

    @property
    def kinds(self) -> str:
        ddp = any(isinstance(x, DistributedDataParallel) for x in self.wrappers)
        fsdp = any(not isinstance(x, DistributedDataParallel) for x in self.wrappers)
        return " and ".join(["DDP"] * ddp + ["FSDP"] * fsdp)

    def left_out(self, model: nn.Module) -> list[str]:
        """Return the names of trainable parameters that no wrapper averages.

        The result is empty if there is no wrapper.
        """
        if not self.wrappers:
            return []
        return [
            f"{name}.{own}" if name else own
            for name, module in model.named_modules()
            for own, x in module.named_parameters(recurse=False)
            if x.requires_grad and not self._has(module, own, x)
        ]

    def _has(self, module: nn.Module, name: str, x: Tensor) -> bool:
        in_fsdp1 = id(module) in self._in_fsdp1 and id(x) not in self._ignored_by_fsdp1
        return in_fsdp1 or id(x) in self._by_ddp or (id(module), name) in self._by_fsdp2

    def leaves(self) -> set[int]:
        groups = [x for x in self.wrappers if not isinstance(x, nn.Module)]
        return self._by_ddp | {id(x) for group in groups for x in fsdp2_tensors(group)}

    def check_backward(self, first: bool) -> None:
        """Raise a ValueError if DDP will not average in the backward that begins now.

        `first` is True for the first backward since the last call of the model.
        """
        if not first and any(ddp.require_backward_grad_sync for ddp in self._ddps):
            way_out = "add the losses, and call backward() once after the last forward"
            reason = "DDP averages in the first backward after a forward only"
            raise ValueError(f"loss.backward() must not be called again: {reason}; {way_out}")

    def check_averaged(self) -> None:
        for ddp in self._ddps:
            try:
                # With a static graph, DDP averages only after its first backward has ended.
                if not ddp.static_graph:
                    check_averaged(ddp)
            except RuntimeError as fault:
                way_out = "set find_unused_parameters=True, and call backward() without inputs="
                reason = f"DDP waited for parameters that got no gradient; {way_out}"
                raise ValueError(f"loss must reach all parameters in DDP: {reason}") from fault

    @classmethod
    def of(cls, root: nn.Module, comm: Comm) -> Averaging:
        """Find the DDP and FSDP wrappers around a model and in its submodules, while the model
        runs.

        Raises a ValueError if the model is a DeepSpeed engine, if a wrapper averages over ranks
        that do not include the whole group, or if a wrapper divides the sum of the gradients by a
        number other than its number of ranks.
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
        _check("DDP", ddp_hooks(ddp), dist.get_process_group_ranks(ddp.process_group), comm)
        self.wrappers.append(ddp)
        named = ddp.module.named_parameters()
        averaged = [x for name, x in named if name not in ddp.parameters_to_ignore]
        trainable, before = sum(x.requires_grad for x in averaged), ddp_parameters(ddp)
        if torch.is_grad_enabled() and trainable > before:
            reason = f"{trainable} are trainable, and {before} were when DDP was made"
            way_out = "wrap the model in DDP again after you unfreeze parameters"
            raise ValueError(
                f"model must not have trainable parameters that DDP leaves out: {reason}; {way_out}"
            )
        self._by_ddp |= set(map(id, averaged))
        if ddp.require_backward_grad_sync:
            self._ddps.append(ddp)
        else:
            self.in_no_sync = True

    def _add_fsdp1(self, fsdp: FullyShardedDataParallel, comm: Comm) -> None:
        _check("FSDP", [fsdp1_hook(fsdp)], dist.get_process_group_ranks(fsdp.process_group), comm)
        self.wrappers.append(fsdp)
        self.flattened = True
        self._in_fsdp1 |= {id(x) for x in fsdp.modules()}
        self._ignored_by_fsdp1 |= {id(x) for x in fsdp1_ignored(fsdp)}

    def _add_fsdp2(self, module: nn.Module, comm: Comm) -> None:
        for group in fsdp2_groups(module):
            mesh = group.mesh_info.mesh.mesh.flatten().tolist()
            _check("FSDP", [fsdp2_hook(group)], mesh, comm)
            divisor = fsdp2_divisor(group)
            if divisor is not None and divisor != len(mesh):
                stated = (
                    f"set_gradient_divide_factor must be {len(mesh)}, or not set, got {divisor}"
                )
                raise ValueError(f"FSDP {_RULE}: {stated}")
            self.wrappers.append(group)
            self._by_fsdp2 |= {(id(owner), name) for owner, name in fsdp2_names(group)}


def own_weights(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of the model's weights of which each rank has a full copy.

    Weights are parameters and persistent buffers.
    """
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


def sum_of_ranks(x: Tensor, comm: Comm, divisor: int = 1) -> Tensor:
    """Sum x (N,) over all ranks, in the order of the ranks, and divide the sum by `divisor`.

    The sum is computed in fp32, or in fp64 if x is fp64. The result has the same bits on all ranks.
    Each of P ranks sends 2·(P − 1)/P·N elements.
    """
    parts = [part.contiguous() for part in x.tensor_split(comm.size)]
    call = comm.call()
    call.join(x.device)
    own = parts[comm.rank]
    others = [own if rank == comm.rank else torch.empty_like(own) for rank in range(comm.size)]
    sends = [(peer, parts[peer]) for peer in comm.peers]
    recvs = [(peer, others[peer]) for peer in comm.peers]
    call.exchange(sends, recvs, label="sum").wait()
    wide = torch.promote_types(x.dtype, torch.float32)
    total = sum(others[1:], others[0].to(wide)) / divisor
    parts[comm.rank] = total.to(x.dtype)
    sends = [(peer, parts[comm.rank]) for peer in comm.peers]
    recvs = [(peer, parts[peer]) for peer in comm.peers]
    call.exchange(sends, recvs, label="sum", step=1).wait()
    return torch.cat(parts)


def local_part(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def like(local: Tensor, x: Tensor) -> Tensor:
    """Return `local` as a DTensor with the placements of `x` if `x` is a DTensor, else `local`
    itself.
    """
    if not isinstance(x, DTensor):
        return local
    return DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def placed_as(x: Tensor, gradient: Tensor | None) -> Tensor | None:
    """Return the gradient of x with the placements of x.

    With tensor parallelism, a gradient may be a partial sum although x is not.
    """
    if not (isinstance(x, DTensor) and isinstance(gradient, DTensor)):
        return gradient
    if gradient.placements != x.placements:
        return gradient.redistribute(placements=x.placements)
    return gradient


def _check(name: str, hooks: Sequence[object | None], averaged: list[int], comm: Comm) -> None:
    """Raise a ValueError unless all gradient hooks are known and average over the whole group."""
    own = comm.processes
    if not set(own) <= set(averaged):
        stated = f"it averages over ranks {averaged}, and the group has {own}"
        raise ValueError(f"{name} {_RULE}: {stated}")
    for hook in hooks:
        if hook is None:
            continue
        hook_name = getattr(hook, "__name__", type(hook).__name__)
        of_torch = str(getattr(hook, "__module__", None)).startswith(_HOOKS)
        if not of_torch or hook_name in _OTHER_HOOKS:
            reason = f"its comm hook {hook_name} is not one of torch's hooks that average"
            raise ValueError(f"{name} {_RULE}: {reason}")
