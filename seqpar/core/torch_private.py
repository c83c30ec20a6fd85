"""The private names of torch that seqpar uses, each with a reason and a version of torch.

No other file uses a private name of torch. A release of torch may drop one: `missing()` lists the
names that are gone. A function that needs one of those raises a RuntimeError that names it; the
other functions work.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from traceback import walk_stack
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Kernel = Callable[..., tuple[Tensor, ...]]
T = TypeVar("T", bound=Callable[..., object])
DDP = torch.nn.parallel.DistributedDataParallel
DispatchKeys = torch._C.DispatchKeySet


class Use(NamedTuple):
    """Why seqpar uses a private name, and the first version of torch known to have it."""

    since: str
    why: str


NAMES = {
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": Use(
        "2.3", "attention on CPUs: the public function returns no lse"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": Use(
        "2.3", "its backward, given the lse of all keys on all ranks"
    ),
    "torch.ops.aten._flash_attention_forward": Use(
        "2.6", "attention on CUDA: one call for all documents, which returns their lse"
    ),
    "torch.ops.aten._flash_attention_backward": Use(
        "2.6", "its backward, given the lse of all keys on all ranks"
    ),
    "torch.ops.aten._scaled_dot_product_cudnn_attention": Use(
        "2.11", "attention of cuDNN: the public function returns no lse"
    ),
    "torch.ops.aten._scaled_dot_product_cudnn_attention_backward": Use(
        "2.11", "its backward, given the lse of all keys on all ranks"
    ),
    "torch.cpu._is_amx_tile_supported": Use(
        "2.6", "to compute bf16 natively where the CPU has matrix units"
    ),
    "torch.cpu._is_avx512_bf16_supported": Use(
        "2.6", "to compute bf16 natively where the CPU has products of bf16"
    ),
    "torch._dynamo.maybe_mark_dynamic": Use(
        "2.1", "compiled graphs take layouts of any size from the first call on"
    ),
    "torch._dynamo.eval_frame.OptimizedModule": Use(
        "2.0", "to refuse a sharded batch in a compiled model that seqpar has not enabled"
    ),
    "torch._dynamo.disable": Use(
        "2.7", "it marks functions that must not be traced; `mark_disabled` sets the same marks"
    ),
    "torch._dynamo.assume_constant_result": Use(
        "2.0", "it marks functions with constant results; `mark_constant` sets the same mark"
    ),
    "torch.utils._python_dispatch._disable_current_modes": Use(
        "2.1", "to compute within a checkpoint's forward without its modes, which record operators"
    ),
    "torch._transformer_encoder_layer_fwd": Use(
        "1.12", "to refuse the fast path of nn.TransformerEncoderLayer in compiled functions"
    ),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Use(
        "2.8", "to never compile a mode's function by itself, which returns wrong values"
    ),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Use("2.8", "an argument of the above"),
    "torch._C._dynamo.eval_frame._FrameAction": Use("2.8", "an argument of the above"),
    "torch._library.fake_class_registry.FakeScriptObject": Use(
        "2.4", "torch.compile passes it in place of a group to functions that it does not trace"
    ),
    "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode": Use(
        "2.0", "to refuse torch.func's transforms, which would return zeros"
    ),
    "torch._C._AutoDispatchBelowAutograd": Use(
        "2.0", "derivatives of operators: those of torch.library take 0.1 ms more per call"
    ),
    "torch._C._get_dispatch_mode": Use(
        "2.1", "to recognise a call that is traced, whose order a graph must keep"
    ),
    "torch._C._TorchDispatchModeKey": Use("2.1", "the kind of mode that traces functional graphs"),
    "torch._C._after_autograd_keyset": Use("2.4", "the dispatch keys below autograd"),
    "torch.Tensor._version": Use("2.0", "to read a GPU tensor again only after a write"),
    "torch._C._swap_tensor_impl": Use(
        "2.3", "to exchange a tensor for its part: swap_tensors refuses tensors saved by autograd"
    ),
    "torch.autograd.has_torch_function": Use(
        "2.0", "backward calls it to find function modes, and leaves these modes while it runs"
    ),
    "torch.distributed.distributed_c10d._world": Use(
        "2.0",
        "to find a loaded module's group, since there is no public list of groups; and to join a "
        "group after one could not be joined, since torch numbers them",
    ),
    "torch.distributed.ProcessGroup._get_backend": Use(
        "2.0", "to read a group's backend and its options"
    ),
    "torch.distributed.ProcessGroup._start_coalescing": Use(
        "2.1", "to post messages as one operation, in an eighth of batch_isend_irecv's time"
    ),
    "torch.distributed.ProcessGroup._end_coalescing": Use("2.1", "the end of that operation"),
    "torch.distributed.ProcessGroup._register_backend": Use(
        "2.0", "another communicator over a group's ranks: new_group may need other ranks too"
    ),
    "torch._C._distributed_c10d.Backend.Options._timeout": Use(
        "2.0", "a group's timeout: a rank that is silent for longer counts as lost"
    ),
    "torch.Tensor._base": Use("1.0", "to know views of parameters, which need no offload"),
    "torch.distributed.DeviceMesh._flatten": Use(
        "2.5", "a group of all ranks of a mesh with several dimensions"
    ),
    "torch.nn.Module._call_impl": Use(
        "1.6", "to find the modules around a running model, such as DDP's and FSDP's"
    ),
    "torch.nn.utils._named_member_accessor.swap_tensor": Use(
        "2.0", "to use tensors in place of parameters, as torch.func.functional_call does"
    ),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": Use(
        "2.6", "to find the parameters that FSDP2 averages, and over which ranks"
    ),
    "torch.nn.parallel.DistributedDataParallel._check_reducer_finalized": Use(
        "2.0", "to check at the end of a backward that DDP averaged in it, not in the next call"
    ),
    "torch._C._will_engine_execute_node": Use(
        "2.0", "to refuse torch.autograd.grad under DDP, which would average no gradients"
    ),
    "torch._C._current_graph_task_id": Use(
        "2.0", "to tell a checkpoint's recomputation from the user's own calls"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Use(
        "1.13", "to observe each operator of a simulated step"
    ),
    "torch.UntypedStorage._cdata": Use("2.0", "to identify memory without data"),
    "torch.ops.aten._unsafe_view": Use("1.0", "to know that a simulated operator copies nothing"),
    "torch.autograd.Variable._execution_engine": Use(
        "1.0", "to sum gradients over ranks at the end of backward, as DDP does"
    ),
}


def missing() -> dict[str, str]:
    """Return the names that this torch lacks, each with its use."""
    return {name: use.why for name, use in NAMES.items() if _found(name) is None}


def _kernel(name: str) -> Kernel:
    return cast(Kernel, _get(f"torch.ops.aten.{name}"))


@cache
def _get(name: str) -> Any:
    """Return the object of this name, one of NAMES; raise a RuntimeError if torch lacks it."""
    found = _found(name)
    if found is None:
        since, why = NAMES[name]
        here = f"torch {torch.__version__} has no {name}"
        raise RuntimeError(f"{here} (torch had it in {since}), which seqpar uses: {why}")
    return found


def _found(name: str) -> Any | None:
    """Return the object of this name, or None. Imports its module if necessary."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(path)
            except ImportError:
                return None
    return found


# ATen's fused attention on CPUs, its FlashAttention-2 on CUDA, and its call of cuDNN: each function
# returns a kernel (q, k, v, …) -> (out, lse, …), or its backward
# (dout, q, k, v, out, lse, …) -> (dq, dk, dv).
cpu_attention = partial(_kernel, "_scaled_dot_product_flash_attention_for_cpu")
cpu_attention_backward = partial(_kernel, "_scaled_dot_product_flash_attention_for_cpu_backward")
cuda_attention = partial(_kernel, "_flash_attention_forward")
cuda_attention_backward = partial(_kernel, "_flash_attention_backward")
cudnn_attention = partial(_kernel, "_scaled_dot_product_cudnn_attention")
cudnn_attention_backward = partial(_kernel, "_scaled_dot_product_cudnn_attention_backward")


@cache
def cpu_has_matrix_units() -> bool:
    """Return whether this CPU has AMX."""
    return bool(_get("torch.cpu._is_amx_tile_supported")())


@cache
def cpu_has_bf16_products() -> bool:
    """Return whether this CPU has AVX512_BF16."""
    return bool(_get("torch.cpu._is_avx512_bf16_supported")())


def compiler_is_loaded() -> bool:
    """Return whether torch.compile may be in use: its first use imports the compiler."""
    return "torch._dynamo" in sys.modules


def mark_dynamic(tensor: Tensor, *dims: int) -> None:
    """Make torch.compile accept other sizes of these dims from the first call on."""
    if compiler_is_loaded():
        _get("torch._dynamo.maybe_mark_dynamic")(tensor, dims)


def mark_disabled(function: Callable[..., object], reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does, without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def mark_constant(function: Callable[..., object]) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, without the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def real_object(x: Any) -> Any:
    """Return the object for which torch.compile passed a fake; other objects as they are."""
    fake = _get("torch._library.fake_class_registry.FakeScriptObject")
    return x.real_obj if isinstance(x, fake) else x


def set_transform_refusal(operator: str, refusal: Callable[..., None]) -> None:
    """Make an operator call `refusal` under the transforms of torch.func."""
    key = "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode"
    torch.library.impl(operator, _get(key).name)(refusal)


def below_autograd(
    operator: Any, keys: DispatchKeys, arguments: tuple[object, ...]
) -> list[Tensor]:
    """Call an operator with these dispatch keys, without those of autograd."""
    with _get("torch._C._AutoDispatchBelowAutograd")():
        results = operator.redispatch(keys & _get("torch._C._after_autograd_keyset"), *arguments)
        return cast(list[Tensor], results)


def trace() -> Any:
    """Return the trace that makes a functional graph, while there is one, or None."""
    kind = _get("torch._C._TorchDispatchModeKey").FUNCTIONAL
    return _get("torch._C._get_dispatch_mode")(kind)


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each write to a tensor, except to inference tensors."""
    return tensor._version


def process_groups() -> list[torch.distributed.ProcessGroup]:
    """Return all process groups that this process has made."""
    return list(_get("torch.distributed.distributed_c10d._world").pg_names)


def forget_failed_group() -> None:
    """Number the next default group as in a process that has joined none."""
    _get("torch.distributed.distributed_c10d._world").group_count = 0


def backend_of(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    """Return a process group's backend for a device."""
    return _get("torch.distributed.ProcessGroup._get_backend")(group, device)


def timeout_of(group: torch.distributed.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a process group's backend for a device."""
    return cast(timedelta, backend_of(group, device).options._timeout)


def start_coalescing(group: torch.distributed.ProcessGroup, device: torch.device) -> None:
    """Begin one operation of all messages that are posted before `end_coalescing`."""
    _get("torch.distributed.ProcessGroup._start_coalescing")(group, device)


def end_coalescing(
    group: torch.distributed.ProcessGroup, device: torch.device
) -> torch.distributed.Work:
    """Post the operation and return its work."""
    work = _get("torch.distributed.ProcessGroup._end_coalescing")(group, device)
    return cast("torch.distributed.Work", work)


def copy_options(backend: Any, options: Any) -> None:
    """Copy the config and the timeout of an NCCL backend to the `options` of another one."""
    options.config, options._timeout = backend.options.config, backend.options._timeout


def group_of(backend: Any, store: Any, device: torch.device) -> torch.distributed.ProcessGroup:
    """Return a group with this NCCL backend, unknown to torch: the caller must shut it down."""
    group = torch.distributed.ProcessGroup(store, backend.rank(), backend.size())
    kind = torch.distributed.ProcessGroup.BackendType.NCCL
    _get("torch.distributed.ProcessGroup._register_backend")(group, device, kind, backend)
    return group


def base_of(x: Tensor) -> Tensor | None:
    """Return the tensor of which `x` is a view, or None if `x` is not a view."""
    return x._base


def swap_contents(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two tensors, but not of the tensors that autograd has saved.

    Setting `a.data` would also change saved tensors, and backward would refuse a resized `a`.
    """
    _get("torch._C._swap_tensor_impl")(a, b)


def within_modes(function: T) -> T:
    """Return a copy of `torch.autograd.backward` or `grad` that does not leave function modes.

    Within a mode, both the copy and everything that backward recomputes run in the mode.
    """
    _get("torch.autograd.has_torch_function")
    original = cast(FunctionType, function)
    names = original.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return cast(T, copy)


def flat_mesh(mesh: Any) -> Any:
    """Return a one-dimensional DeviceMesh with all ranks of a DeviceMesh."""
    return _get("torch.distributed.DeviceMesh._flatten")(mesh)


def calling_modules() -> list[torch.nn.Module]:
    """Return the modules whose calls run now in this thread, the innermost first."""
    code = _get("torch.nn.Module._call_impl").__code__
    frames = walk_stack(inspect.currentframe())
    return [frame.f_locals["self"] for frame, _ in frames if frame.f_code is code]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled, by torch.compile or by its method compile()."""
    compiled = vars(module).get("_compiled_call_impl")  # the method sets it
    return compiled is not None or type(module) is compiled_modules()


def compiled_modules() -> type[torch.nn.Module] | None:
    """Return the class of the modules that torch.compile returns; None before it is loaded."""
    if not compiler_is_loaded():
        return None
    return cast(type[torch.nn.Module], _get("torch._dynamo.eval_frame.OptimizedModule"))


def runs_compiled() -> bool:
    """Return whether a caller of this function is code that torch.compile made."""
    codes = (frame.f_code for frame, _ in walk_stack(inspect.currentframe()))
    return any(
        code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")
        for code in codes
    )


def parameters_in(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own parameters by name, in a tenth of the time of named_parameters."""
    return cast(dict[str, Tensor | None], vars(module)["_parameters"])


def put_tensor(module: torch.nn.Module, name: str, tensor: Tensor) -> None:
    """Make a module use a tensor in place of its parameter of this name."""
    _get("torch.nn.utils._named_member_accessor.swap_tensor")(module, name, tensor)


def fsdp2_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 shards together for a module."""
    state = _get("torch.distributed.fsdp.FSDPModule._get_fsdp_state")(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 a module had one at most
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def fsdp2_names(group: Any) -> list[tuple[torch.nn.Module, str]]:
    """Return the module and name of each parameter of one of FSDP2's groups."""
    places: list[tuple[torch.nn.Module, str]] = []
    for parameter in group.fsdp_params:
        info = getattr(parameter, "_module_info")  # noqa: B009 - a private name
        places.append((info.module, info.param_name))
        places += zip(info.shared_modules, info.shared_param_names, strict=True)
    return places


def fsdp2_tensors(group: Any) -> list[Tensor | None]:
    """Return the tensors that a call uses in place of the parameters of one of FSDP2's groups."""
    return [getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params]


def fsdp1_ignored(module: torch.nn.Module) -> set[Tensor]:
    """Return the parameters inside a FullyShardedDataParallel that FSDP does not manage."""
    return cast(set[Tensor], getattr(module, "_ignored_params", set()))


def ddp_parameters(ddp: DDP) -> list[Tensor]:
    """Return the parameters whose gradients a DistributedDataParallel averages."""
    return cast(list[Tensor], getattr(ddp, "_module_parameters", list(ddp.module.parameters())))


def gradient_hooks(wrapped: object) -> list[object]:
    """Return the users' functions that reduce gradients in the place of DDP or FSDP."""
    hooks = [hook for hook, _ in getattr(wrapped, "_comm_hooks", ())]  # DDP
    names = ("_comm_hook", "_all_reduce_hook")  # FSDP1's module, and FSDP2's group
    hooks += [getattr(wrapped, name, None) for name in names]
    return [hook for hook in hooks if hook is not None]


def check_averaged(ddp: DDP) -> None:
    """Raise a RuntimeError if DDP waits for gradients at the end of a backward."""
    _get("torch.nn.parallel.DistributedDataParallel._check_reducer_finalized")(ddp)


def has_hooks(x: Tensor) -> bool:
    """Return whether users read a parameter's gradient, or step its optimizer, in backward."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
    return any(getattr(x, name, None) for name in names)


def returned_by_grad(leaves: list[Tensor]) -> bool:
    """Return whether torch.autograd.grad runs now, and returns the gradient of one of the leaves.

    DDP's hooks of leaves are then not called.
    """
    executes = _get("torch._C._will_engine_execute_node")
    for x in leaves:
        try:
            if executes(torch.autograd.graph.get_gradient_edge(x).node):
                return False
        except RuntimeError:  # torch raises it if grad returns this gradient
            return True
    return False


def in_backward() -> bool:
    """Return whether this thread runs a backward; checkpoints are recomputed there."""
    return bool(_get("torch._C._current_graph_task_id")() != -1)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the running backward."""
    _get("torch.autograd.Variable._execution_engine").queue_callback(function)


def dispatch_mode() -> Any:
    """Return the class of modes that are called with each operator."""
    return _get("torch.utils._python_dispatch.TorchDispatchMode")


def memory_of(x: Tensor) -> int:
    """Return a number that identifies a tensor's memory, even on the meta device."""
    return x.untyped_storage()._cdata


def unsafe_view() -> object:
    """Return the operator with which a matrix product takes a view of its result."""
    return _get("torch.ops.aten._unsafe_view")


@contextmanager
def beside_the_caller() -> Iterator[None]:
    """Compute outside the caller's dispatch modes and hooks of saved tensors."""
    modes = _get("torch.utils._python_dispatch._disable_current_modes")
    with saved_tensors_hooks(lambda x: x, lambda x: x), modes():
        yield


def fast_encoder_layer() -> object:
    """Return the kernel of nn.TransformerEncoderLayer's fast path, or None if torch lacks it."""
    return _found("torch._transformer_encoder_layer_fwd")


def inlined_only(function: T) -> T:
    """Mark a function that torch.compile may trace inside callers, but may not compile by itself.

    If torch.compile compiles a mode's `__torch_function__` by itself, after a graph break, the
    function returns the value of one attribute for another: its guards confuse their getters.
    """
    strategy = _found("torch._C._dynamo.eval_frame._FrameExecStrategy")
    action = _found("torch._C._dynamo.eval_frame._FrameAction")
    set_strategy = _found("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    if strategy and action and set_strategy:  # without them, only graph breaks are unsafe
        set_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))
    return function
