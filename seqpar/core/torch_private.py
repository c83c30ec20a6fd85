"""The private names of torch that seqpar uses, each with a reason and a version of torch.

No other file uses a private name of torch. A release of torch may drop a name. `TORCH.missing()`
lists the names that the installed torch does not have. A function that needs a missing name raises
a RuntimeError that contains the name. All other functions work.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from traceback import walk_stack
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from seqpar.core.private_names import PrivateNames, Use

Kernel = Callable[..., tuple[Tensor, ...]]
T = TypeVar("T", bound=Callable[..., object])
V = TypeVar("V")
DDP = torch.nn.parallel.DistributedDataParallel
DispatchKeys = torch._C.DispatchKeySet


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
        "2.0", "to refuse a model that torch.compile has wrapped, whose checks it would compile too"
    ),
    "torch._C.DisableTorchFunction": Use(
        "2.0", "recordings compute without the caller's function modes, such as checkers of types"
    ),
    "torch.utils._python_dispatch._disable_current_modes": Use(
        "2.1", "to compute within a checkpoint's forward without its modes, which record operators"
    ),
    "torch._C._autograd._top_saved_tensors_default_hooks": Use(
        "2.6", "to count what autograd saves, and leave it to the hooks around"
    ),
    "torch._C._autograd._saved_tensors_hooks_is_enabled": Use(
        "1.13", "where hooks of saved tensors are disabled, none of them have to be replaced"
    ),
    "torch._transformer_encoder_layer_fwd": Use(
        "1.12", "to refuse the fast path of nn.TransformerEncoderLayer in compiled functions"
    ),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Use(
        "2.8",
        "to never compile a mode's function by itself, which returns wrong values, nor an "
        "operator's, which compiles the planner",
    ),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Use("2.8", "an argument of the above"),
    "torch._C._dynamo.eval_frame._FrameAction": Use("2.8", "an argument of the above"),
    "torch._library.fake_class_registry.FakeScriptObject": Use(
        "2.4", "torch.compile passes it in place of a group to functions that it does not trace"
    ),
    "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode": Use(
        "2.0", "to refuse torch.func's transforms, which would return zeros"
    ),
    "torch.ops.aten.add.Tensor._schema": Use(
        "1.11", "the names of an operator's arguments, and to which of them it writes"
    ),
    "torch._C._AutoDispatchBelowAutograd": Use(
        "2.0", "derivatives of operators: those of torch.library take 0.1 ms more per call"
    ),
    "torch._C._get_dispatch_mode": Use(
        "2.1", "to recognise a call that is traced, whose order a graph must keep, on its thread"
    ),
    "torch._C._TorchDispatchModeKey": Use(
        "2.1", "the kinds of modes that trace functional graphs, and that make fake tensors"
    ),
    "torch._C.DispatchKeySet": Use("2.0", "the type of these keys"),
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
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": Use(
        "2.6", "to find the parameters that FSDP2 averages, and over which ranks"
    ),
    "torch.nn.parallel.DistributedDataParallel._check_reducer_finalized": Use(
        "2.0", "to check at the end of a backward that DDP averaged in it, not in the next call"
    ),
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data": Use(
        "1.9", "to know how many parameters DDP averages, those that it found trainable"
    ),
    "torch._C._current_graph_task_id": Use(
        "2.0", "to tell a checkpoint's recomputation from the user's own calls"
    ),
    "torch._C._stash_obj_in_tls": Use(
        "2.0", "to set a value for one thread, which autograd's threads inherit in its backwards"
    ),
    "torch._C._is_key_in_tls": Use("2.0", "to know whether a thread has such a value"),
    "torch._C._get_obj_in_tls": Use("2.0", "to read such a value"),
    "torch.utils._python_dispatch.TorchDispatchMode": Use(
        "1.13", "to observe each operator of a simulated step"
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": Use(
        "1.13", "to let FlashAttention-4 compile a call that computes nothing"
    ),
    "torch.UntypedStorage._cdata": Use("2.0", "to identify memory without data"),
    "torch.ops.aten._unsafe_view": Use("1.0", "to know that a simulated operator copies nothing"),
    "torch.ops.aten._is_any_true": Use(
        "2.0", "to answer anomaly mode, which asks whether simulated gradients have a NaN"
    ),
    "torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE": Use(
        "2.0", "to leave the names of wrappers out of the names of a model's modules"
    ),
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE": Use(
        "2.0", "the same for wrappers that checkpoint"
    ),
    "torch.nn.parallel.distributed._DDPSink": Use(
        "2.0", "to follow one output of a model through DDP's node in autograd's graph"
    ),
    "torch.ops._c10d_functional.all_reduce": Use(
        "2.1", "to know operators that send messages, by their namespace"
    ),
    "torch._library.custom_ops.CustomOpDef": Use(
        "2.4", "to read the arguments of FlashAttention's functions, which may be operators"
    ),
    "torch.autograd.Variable._execution_engine": Use(
        "1.0", "to sum gradients over ranks at the end of backward, as DDP does"
    ),
}

# Attributes that objects have, but their classes do not. Each is checked when it is read.
ATTRIBUTES = {
    "_compiled_call_impl": Use("2.0", "to know modules that were compiled by their own compile()"),
    "_fsdp_param_groups": Use("2.12", "to find the parameters that FSDP2 averages"),
    "_fsdp_param_group": Use("2.4", "the same before torch 2.12"),
    "_module_info": Use("2.4", "the modules and names of a parameter of FSDP2's"),
    "_unsharded_param": Use("2.4", "the tensor that a call uses in place of such a parameter"),
    "_ignored_params": Use("2.0", "the parameters inside FSDP1 that it does not average"),
    "_comm_hooks": Use("2.1", "the functions that reduce gradients in the place of DDP"),
    "_comm_hook": Use("2.1", "the function that reduces gradients in the place of FSDP1"),
    "_all_reduce_hook": Use("2.5", "the function that reduces gradients in the place of FSDP2"),
    "gradient_divide_factor": Use("2.8", "the number by which FSDP2 divides gradients"),
    "_forward_pre_hooks": Use("2.0", "to call a module without its hooks, or to check them"),
    "_forward_hooks": Use("2.0", "the same for hooks after the module"),
    "_backward_pre_hooks": Use("2.0", "the same for hooks before its backward"),
    "_backward_hooks": Use("2.0", "the same for hooks after its backward"),
    "_buffers": Use("2.0", "to call a module without a change of its buffers"),
    "_init_fn": Use("2.4", "the function of an operator, which has its arguments"),
    "_torchdynamo_disable": Use("2.1", "the mark of functions that must not be traced"),
    "_torchdynamo_disable_msg": Use("2.7", "the reason in this mark"),
    "_dynamo_marked_constant": Use("2.1", "the mark of functions with constant results"),
    "_orig_mod": Use(
        "2.0",
        "the same for modules that torch.compile returns",
        "torch._dynamo.eval_frame.OptimizedModule.__init__",
    ),
    "compile_wrapper": Use(
        "2.6",
        "the function that runs compiled code, to know that a caller is compiled",
        "torch._dynamo.eval_frame._TorchDynamoContext.__call__",
    ),
}


TORCH = PrivateNames("torch", NAMES, ATTRIBUTES)
_get = TORCH.get


def _kernel(name: str) -> Kernel:
    return cast(Kernel, _get(f"torch.ops.aten.{name}"))


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
    return bool(_get("torch.cpu._is_amx_tile_supported")())


@cache
def cpu_has_bf16_products() -> bool:
    return bool(_get("torch.cpu._is_avx512_bf16_supported")())


def compiler_is_loaded() -> bool:
    """Return whether torch.compile may be in use in this process. The first use of torch.compile
    imports the compiler.
    """
    return "torch._dynamo" in sys.modules


def mark_dynamic(tensor: Tensor, *dims: int) -> None:
    """Let torch.compile treat the sizes of these dims as variable in the first graph, so that a
    different size does not recompile the graph.
    """
    if compiler_is_loaded():
        _check_marks()
        _get("torch._dynamo.maybe_mark_dynamic")(tensor, dims)


@cache
def _check_marks() -> None:
    """Raise a RuntimeError if the compiler is loaded and ignores the marks of the functions in this
    file.
    """

    def function() -> None: ...

    disabled = torch.compiler.disable(function, reason="")
    TORCH.read(disabled, "_torchdynamo_disable")
    TORCH.read(disabled, "_torchdynamo_disable_msg")
    TORCH.read(torch.compiler.assume_constant_result(function), "_dynamo_marked_constant")
    for name in _STRATEGIES:
        _get(name)


def mark_disabled(function: Callable[..., object], reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does, without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def mark_constant(function: Callable[..., object]) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, without the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def real_object(x: Any) -> Any:
    """Return the object for which torch.compile has passed the fake `x`. If `x` is not such a fake,
    return `x`.
    """
    fake = _get("torch._library.fake_class_registry.FakeScriptObject")
    return x.real_obj if isinstance(x, fake) else x


def set_transform_refusal(operator: str, refusal: Callable[..., None]) -> None:
    """Make an operator call `refusal` under the transforms of torch.func."""
    key = "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode"
    torch.library.impl(operator, _get(key).name)(refusal)


def argument_names(operator: Any) -> list[str]:
    return [argument.name for argument in TORCH.read(operator, "_schema").arguments]


@cache
def written_arguments(operator: Any) -> list[tuple[int, str]]:
    """Return the positions and the names of the arguments to which an operator writes."""
    arguments = enumerate(TORCH.read(operator, "_schema").arguments)
    return [(i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write]


def below_autograd(
    operator: Any, keys: DispatchKeys, arguments: tuple[object, ...]
) -> list[Tensor]:
    """Call an operator with the given dispatch keys, but without the keys of autograd."""
    with _get("torch._C._AutoDispatchBelowAutograd")():
        results = operator.redispatch(keys & _get("torch._C._after_autograd_keyset"), *arguments)
        return cast(list[Tensor], results)


def trace() -> Any:
    """Return torch's functionalization mode if a trace in this thread uses it now, or None."""
    kind = _get("torch._C._TorchDispatchModeKey").FUNCTIONAL
    return _get("torch._C._get_dispatch_mode")(kind)


def has_fake_mode() -> bool:
    kind = _get("torch._C._TorchDispatchModeKey").FAKE
    return _get("torch._C._get_dispatch_mode")(kind) is not None


def version_of(tensor: Tensor) -> int:
    """Return a number that grows with each write to a tensor. Inference tensors have no such
    number.
    """
    return cast(int, TORCH.read(tensor, "_version"))


def process_groups() -> list[torch.distributed.ProcessGroup]:
    return list(_get("torch.distributed.distributed_c10d._world").pg_names)


def forget_failed_group() -> None:
    """Let torch number the next default group as in a process that has had no group."""
    _get("torch.distributed.distributed_c10d._world").group_count = 0


def backend_of(group: torch.distributed.ProcessGroup, device: torch.device) -> Any:
    return _get("torch.distributed.ProcessGroup._get_backend")(group, device)


def timeout_of(group: torch.distributed.ProcessGroup, device: torch.device) -> timedelta:
    return cast(timedelta, TORCH.read(backend_of(group, device).options, "_timeout"))


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
    """Copy the config and the timeout of an NCCL backend to the `options` of another backend."""
    options.config = backend.options.config
    options._timeout = TORCH.read(backend.options, "_timeout")


def group_of(backend: Any, store: Any, device: torch.device) -> torch.distributed.ProcessGroup:
    """Return a group with this NCCL backend. torch does not know the group, so the caller must shut
    it down.
    """
    group = torch.distributed.ProcessGroup(store, backend.rank(), backend.size())
    kind = torch.distributed.ProcessGroup.BackendType.NCCL
    _get("torch.distributed.ProcessGroup._register_backend")(group, device, kind, backend)
    return group


def base_of(x: Tensor) -> Tensor | None:
    """Return the tensor of which `x` is a view, or None if `x` is not a view."""
    return cast(Tensor | None, TORCH.read(x, "_base"))


def swap_contents(a: Tensor, b: Tensor) -> None:
    """Exchange the contents of two tensors. Tensors that autograd has saved keep their contents."""
    # An assignment to `a.data` would also change saved tensors, and backward would refuse `a` after
    # a change of its size.
    _get("torch._C._swap_tensor_impl")(a, b)


def within_modes(function: T) -> T:
    """Return a copy of `torch.autograd.backward` or `torch.autograd.grad` that runs within the
    function modes of its caller.

    If the copy is called within a mode, everything that backward recomputes runs in this mode.
    """
    _get("torch.autograd.has_torch_function")
    original = cast(FunctionType, function)
    names = original.__globals__ | {"has_torch_function": lambda _: False}
    copy = FunctionType(original.__code__, names, original.__name__, original.__defaults__)
    copy.__kwdefaults__ = original.__kwdefaults__
    return cast(T, copy)


def flat_mesh(mesh: Any) -> Any:
    return _get("torch.distributed.DeviceMesh._flatten")(mesh)


def calling_modules() -> list[torch.nn.Module]:
    """Return the modules whose calls run now in this thread, the innermost first."""
    code = _get("torch.nn.Module._call_impl").__code__
    frames = walk_stack(inspect.currentframe())
    return [frame.f_locals["self"] for frame, _ in frames if frame.f_code is code]


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module was compiled, by torch.compile or by its method compile()."""
    return (
        TORCH.read(module, "_compiled_call_impl") is not None or type(module) is compiled_modules()
    )


def uncompiled(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes that a copy of a compiled module needs to run without the compiler."""
    if not is_compiled(module):
        return {}
    if type(module) is compiled_modules():
        return {"forward": next(module.children())}
    return {"_compiled_call_impl": None}


def forward_hooks(module: torch.nn.Module) -> list[dict[int, Any]]:
    """Return the dictionaries of hooks that a module calls before and after its forward."""
    return [TORCH.read(module, "_forward_pre_hooks"), TORCH.read(module, "_forward_hooks")]


def bare(module: torch.nn.Module, copy: Callable[[Any], Any]) -> dict[str, Any]:
    """Return attributes with which a copy of a module runs without hooks, without the compiler, and
    without changing the buffers of the module.
    """
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    hooks = {kind: type(TORCH.read(module, kind))() for kind in kinds}
    buffers = {name: copy(x) for name, x in TORCH.read(module, "_buffers").items()}
    TORCH.read(module, "_compiled_call_impl")
    return hooks | {"_buffers": buffers, "_compiled_call_impl": None}


@contextmanager
def observed_compiled_call(
    module: torch.nn.Module, observe: Callable[[object], object]
) -> Iterator[None]:
    """Call `observe` with each result of a module that was compiled by its method compile()."""
    # Hooks are compiled with the module, and would observe traced values instead of results.
    compiled = TORCH.read(module, "_compiled_call_impl")

    def call(*arguments: Any, **options: Any) -> object:
        result = compiled(*arguments, **options)
        observe(result)
        return result

    module.__dict__["_compiled_call_impl"] = call
    try:
        yield
    finally:
        module.__dict__["_compiled_call_impl"] = compiled


def wrappers_names() -> set[str]:
    """Return the attribute names under which wrappers keep the module that they wrap."""
    if compiler_is_loaded():
        TORCH.check_named("_orig_mod")
    fsdp = _get("torch.distributed.fsdp._common_utils.FSDP_WRAPPED_MODULE")
    name = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE"
    return {"module", "_orig_mod", fsdp, _get(name)}


def compiled_modules() -> type[torch.nn.Module] | None:
    """Return the class of the modules that torch.compile returns, or None if the compiler is not
    loaded.
    """
    if not compiler_is_loaded():
        return None
    return cast(type[torch.nn.Module], _get("torch._dynamo.eval_frame.OptimizedModule"))


def runs_compiled() -> bool:
    """Return whether a caller of this function is code that torch.compile made."""
    TORCH.check_named("compile_wrapper")
    codes = (frame.f_code for frame, _ in walk_stack(inspect.currentframe()))
    return any(
        code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")
        for code in codes
    )


def fsdp2_groups(module: torch.nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 shards together for a module."""
    state = _get("torch.distributed.fsdp.FSDPModule._get_fsdp_state")(module)
    # Before torch 2.12 a module had at most one group.
    groups = TORCH.read(state, "_fsdp_param_groups", "_fsdp_param_group")
    groups = groups if isinstance(groups, list | tuple) else [groups]
    return [group for group in groups if group is not None]


def fsdp2_names(group: Any) -> list[tuple[torch.nn.Module, str]]:
    """Return the module and name of each parameter of one of FSDP2's groups."""
    places: list[tuple[torch.nn.Module, str]] = []
    for parameter in group.fsdp_params:
        info = TORCH.read(parameter, "_module_info")
        places.append((info.module, info.param_name))
        places += zip(info.shared_modules, info.shared_param_names, strict=True)
    return places


def fsdp2_tensors(group: Any) -> list[Tensor]:
    """Return the tensors that a call used in place of the parameters of one of FSDP2's groups."""
    tensors: list[Tensor] = []
    for parameter in group.fsdp_params:
        declared = "_unsharded_param" in type(parameter).__annotations__
        # Without the attribute, no call has used the parameter yet.
        if hasattr(parameter, "_unsharded_param") or not declared:
            tensors.append(TORCH.read(parameter, "_unsharded_param"))
    return tensors


def fsdp1_ignored(module: torch.nn.Module) -> set[Tensor]:
    """Return the parameters inside a FullyShardedDataParallel that FSDP does not manage."""
    return cast(set[Tensor], TORCH.read(module, "_ignored_params"))


def ddp_hooks(ddp: DDP) -> list[object]:
    """Return the functions that users have set to reduce gradients in place of DDP."""
    return [hook for hook, _ in TORCH.read(ddp, "_comm_hooks")]


def ddp_parameters(ddp: DDP) -> int:
    """Return the number of parameters whose gradients DDP averages. These are the parameters that
    were trainable when DDP was created.
    """
    found = _get("torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data")(ddp)
    return cast(int, found["num_parameter_tensors"])


def fsdp1_hook(module: torch.nn.Module) -> object | None:
    """Return the function that the user has set to reduce gradients in place of FSDP1, or None."""
    return TORCH.read(module, "_comm_hook")


def fsdp2_hook(group: Any) -> object | None:
    """Return the function that the user has set to reduce gradients in place of FSDP2, or None."""
    return TORCH.read(group, "_all_reduce_hook")


def fsdp2_divisor(group: Any) -> float | None:
    """Return the number by which FSDP2 divides gradients, or None if the user has not set this
    number.
    """
    return cast(float | None, TORCH.read(group, "gradient_divide_factor"))


def ddp_node() -> str:
    """Return the name of the autograd node through which DDP passes all outputs of a model."""
    return f"{_get('torch.nn.parallel.distributed._DDPSink').__name__}Backward"


def check_averaged(ddp: DDP) -> None:
    """Raise a RuntimeError if DDP still waits for gradients at the end of a backward."""
    _get("torch.nn.parallel.DistributedDataParallel._check_reducer_finalized")(ddp)


def in_backward() -> bool:
    """Return whether this thread runs a backward, in which checkpoints are recomputed."""
    return bool(_get("torch._C._current_graph_task_id")() != -1)


def inherited(name: str, default: V) -> V:
    """Return the value that `set_inherited` has set in this thread, or the default.

    In a thread of autograd, the result is the value of the thread that called backward.
    """
    if not _get("torch._C._is_key_in_tls")(name):
        return default
    return cast(V, _get("torch._C._get_obj_in_tls")(name))


def set_inherited(name: str, value: object) -> None:
    """Set a value of this thread, which autograd's threads inherit."""
    if _stash_steals_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _get("torch._C._stash_obj_in_tls")(name, value)


@cache
def _stash_steals_references() -> bool:
    """Return whether `set_inherited` would make torch drop a reference that it does not own, as in
    torch 2.11.
    """
    probe = object()
    before = sys.getrefcount(probe)
    # torch would drop the reference when a thread's value is replaced, and the old value would be
    # freed while other threads use it.
    _get("torch._C._stash_obj_in_tls")("seqpar probe", probe)
    if sys.getrefcount(probe) > before:
        return False
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return True


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` at the end of the running backward."""
    _get("torch.autograd.Variable._execution_engine").queue_callback(function)


def dispatch_mode() -> Any:
    """Return torch's base class for modes that intercept each operator."""
    return _get("torch.utils._python_dispatch.TorchDispatchMode")


def fake_tensors() -> AbstractContextManager[object]:
    """Return a context in which new tensors have no data, whatever their device is."""
    mode: AbstractContextManager[object] = _get("torch._subclasses.fake_tensor.FakeTensorMode")()
    return mode


def memory_of(x: Tensor) -> int:
    """Return a number that identifies a tensor's memory, even on the meta device."""
    return cast(int, TORCH.read(x.untyped_storage(), "_cdata"))


def saving_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost hooks of saved tensors, a function that packs and a function that
    unpacks, or None.
    """
    hooks: Any = _get("torch._C._autograd._top_saved_tensors_default_hooks")(True)
    return None if hooks is None else tuple(hooks)


def unsafe_view() -> object:
    """Return the operator with which a matrix product makes a view of its result."""
    return _get("torch.ops.aten._unsafe_view")


def sends_messages(operator: Any) -> bool:
    """Return whether an operator belongs to torch.distributed."""
    _get("torch.ops._c10d_functional.all_reduce")
    return operator.namespace in ("c10d", "_c10d_functional")


def function_of(operator: Any) -> Any:
    """Return the function from which torch.library.custom_op made an operator. If there is none,
    return the operator itself.
    """
    of_library = isinstance(operator, _get("torch._library.custom_ops.CustomOpDef"))
    return TORCH.read(operator, "_init_fn") if of_library else operator


def is_any_true() -> object:
    """Return the operator with which anomaly mode asks whether a gradient has a NaN."""
    return _get("torch.ops.aten._is_any_true")


@contextmanager
def beside_the_caller() -> Iterator[None]:
    """Within this context, turn off the dispatch modes and the hooks of saved tensors that the
    caller has set.
    """
    modes = _get("torch.utils._python_dispatch._disable_current_modes")
    has_hooks = _get("torch._C._autograd._saved_tensors_hooks_is_enabled")()
    hooks = saved_tensors_hooks(lambda x: x, lambda x: x) if has_hooks else nullcontext()
    with hooks, modes():
        yield


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Within this context, turn off function modes and the __torch_function__ of tensor
    subclasses.
    """
    with _get("torch._C.DisableTorchFunction")():
        yield


def fast_encoder_layer() -> object:
    """Return the kernel of nn.TransformerEncoderLayer's fast path."""
    return _get("torch._transformer_encoder_layer_fwd")


def inlined_only(function: T) -> T:
    """Mark a function that torch.compile may trace as a part of its callers, but may not compile by
    itself.
    """
    # After a graph break, torch.compile would compile a mode's `__torch_function__` by itself. The
    # compiled function could return the value of a different attribute, because its guards do not
    # distinguish the getters of attributes.
    return _skipped(function, "DEFAULT")


def never_compiled(function: T) -> T:
    """Mark a function that torch.compile may not compile by itself. torch.compile may also not
    compile the functions that this function calls.

    The function may still be traced as a part of a caller. Unlike the wrapper of
    `torch.compiler.disable`, the mark takes no time in a call.
    """
    return _skipped(function, "SKIP")


_STRATEGIES = (
    "torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction",
)


def _skipped(function: T, callees: str) -> T:
    set_strategy, strategy, action = map(TORCH.find, _STRATEGIES)
    if strategy and action and set_strategy:  # `_check_marks` refuses to compile without them
        code = inspect.unwrap(function).__code__  # all wrappers such as no_grad share one code
        set_strategy(code, strategy(action.SKIP, getattr(action, callees)))
    return function
