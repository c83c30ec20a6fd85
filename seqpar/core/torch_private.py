"""The private names of torch that seqpar uses: here alone, each with why and since when.

Any release of torch may drop one. `missing()` says which are gone. What needs one of those raises a
RuntimeError that says so; the rest works.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Kernel = Callable[..., tuple[Tensor, ...]]
T = TypeVar("T", bound=Callable[..., Any])


class Use(NamedTuple):
    """Since when torch has a private name as it is used here, at the latest, and why it is used."""

    since: str
    why: str


NAMES = {
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": Use(
        "2.3", "attention on CPUs: the public function returns no lse"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": Use(
        "2.3", "its backward, given the lse of all keys on all ranks"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention": Use(
        "2.1", "attention on CUDA: the public function returns no lse"
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_backward": Use(
        "2.1", "its backward, given the lse of all keys on all ranks"
    ),
    "torch.cpu._is_amx_tile_supported": Use(
        "2.6", "to compute bf16 natively where the CPU has matrix units"
    ),
    "torch.cpu._is_avx512_bf16_supported": Use("2.6", "likewise, where it has products of bf16"),
    "torch._dynamo.maybe_mark_dynamic": Use(
        "2.1", "graphs that take layouts of any size from the first call on"
    ),
    "torch._dynamo.disable": Use(
        "2.7", "it marks functions that are not to be traced: `mark_disabled` does as it does"
    ),
    "torch._dynamo.assume_constant_result": Use(
        "2.0", "likewise functions whose results graphs take as constants: `mark_constant`"
    ),
    "torch.utils._python_dispatch._disable_current_modes": Use(
        "2.1", "to compute beside a checkpoint's forward, whose modes note what is computed"
    ),
    "torch._transformer_encoder_layer_fwd": Use(
        "1.12", "to refuse the fast path of nn.TransformerEncoderLayer in compiled functions"
    ),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": Use(
        "2.8", "so that a mode's function is never compiled by itself: that returns wrong values"
    ),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": Use("2.8", "likewise"),
    "torch._C._dynamo.eval_frame._FrameAction": Use("2.8", "likewise"),
    "torch._library.fake_class_registry.FakeScriptObject": Use(
        "2.4", "what torch.compile gives a function that it does not trace in a group's place"
    ),
    "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode": Use(
        "2.0", "to refuse torch.func's transforms, which would return zeros"
    ),
    "torch._C._AutoDispatchBelowAutograd": Use(
        "2.0", "derivatives of operators: torch.library's own take 0.1 ms more of a call"
    ),
    "torch._C._after_autograd_keyset": Use("2.4", "likewise: what runs below autograd"),
    "torch.Tensor._version": Use("2.0", "to read a GPU's numbers once, until they are written to"),
    "torch._C._swap_tensor_impl": Use(
        "2.3", "to exchange tensors for parts of them: swap_tensors takes none that autograd saved"
    ),
    "torch.autograd.has_torch_function": Use(
        "2.0", "by which backward asks torch's function modes, and leaves them while it runs"
    ),
    "torch.distributed.distributed_c10d._world": Use(
        "2.0", "to find a loaded module's group among all groups: there is no public list"
    ),
    "torch.distributed.ProcessGroup._get_backend": Use(
        "2.0", "to get at a group's backend and its options"
    ),
    "torch.distributed.ProcessGroup._start_coalescing": Use(
        "2.1", "to post messages at once, an eighth of the time that batch_isend_irecv takes"
    ),
    "torch.distributed.ProcessGroup._end_coalescing": Use("2.1", "likewise"),
    "torch.distributed.ProcessGroup._register_backend": Use(
        "2.0", "a further communicator over a group's ranks: new_group may need others too"
    ),
    "torch._C._distributed_c10d.Backend.Options._timeout": Use(
        "2.0", "a group's timeout, which decides when a silent rank counts as lost"
    ),
    "torch.Tensor._base": Use("1.0", "to know views of parameters, which need no offload"),
    "torch.distributed.DeviceMesh._flatten": Use(
        "2.5", "a group of all ranks of a mesh with several dimensions"
    ),
    "torch.nn.Module._call_impl": Use(
        "1.6", "to know the modules around a model that is being called, such as DDP's and FSDP's"
    ),
    "torch.nn.utils._named_member_accessor.swap_tensor": Use(
        "2.0", "to use tensors in the place of parameters, as torch.func.functional_call does"
    ),
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": Use(
        "2.6", "to know which parameters FSDP2 averages, over which ranks"
    ),
    "torch.nn.parallel.DistributedDataParallel._check_reducer_finalized": Use(
        "2.0", "to know whether DDP averaged in the backward that ends, and not in the next call"
    ),
    "torch._C._will_engine_execute_node": Use(
        "2.0", "to refuse torch.autograd.grad under DDP, which then averages nothing"
    ),
    "torch._C._current_graph_task_id": Use(
        "2.0", "to know a checkpoint's recomputation from the user's own calls"
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": Use(
        "1.13", "to see each operator of a rank whose step is simulated"
    ),
    "torch.utils._pytree.tree_leaves": Use("2.2", "to find the tensors among an operator's values"),
    "torch.UntypedStorage._cdata": Use("2.0", "to tell memory apart that has no data"),
    "torch.ops.aten._unsafe_view": Use("1.0", "to know that a simulated operator copies nothing"),
    "torch.autograd.Variable._execution_engine": Use(
        "1.0", "to sum gradients over ranks when backward is at its end, as DDP does"
    ),
}


def missing() -> dict[str, str]:
    """Return what is gone from this torch: what each name is for, by name."""
    return {name: use.why for name, use in NAMES.items() if _found(name) is None}


def cpu_attention() -> Kernel:
    """Return ATen's fused attention on CPUs, (q, k, v, …) -> (out, lse)."""
    return _kernel("_scaled_dot_product_flash_attention_for_cpu")


def cpu_attention_backward() -> Kernel:
    """Return its backward, (dout, q, k, v, out, lse, …) -> (dq, dk, dv)."""
    return _kernel("_scaled_dot_product_flash_attention_for_cpu_backward")


def cuda_attention() -> Kernel:
    """Return ATen's FlashAttention-2, (q, k, v, …) -> (out, lse, …)."""
    return _kernel("_scaled_dot_product_flash_attention")


def cuda_attention_backward() -> Kernel:
    """Return its backward, (dout, q, k, v, out, lse, …) -> (dq, dk, dv)."""
    return _kernel("_scaled_dot_product_flash_attention_backward")


@cache
def cpu_has_matrix_units() -> bool:
    """Return whether this CPU has AMX."""
    return bool(_get("torch.cpu._is_amx_tile_supported")())


@cache
def cpu_has_bf16_products() -> bool:
    """Return whether this CPU has AVX512_BF16."""
    return bool(_get("torch.cpu._is_avx512_bf16_supported")())


def compiler_is_loaded() -> bool:
    """Return whether torch.compile may be at work: it is not imported before it is used."""
    return "torch._dynamo" in sys.modules


def mark_dynamic(tensor: Tensor, *dims: int) -> None:
    """Let torch.compile, where it is in use, take tensors of other sizes from the first call on."""
    if compiler_is_loaded():
        _get("torch._dynamo.maybe_mark_dynamic")(tensor, dims)


def mark_disabled(function: Callable[..., Any], reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does, without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]


def mark_constant(function: Callable[..., Any]) -> None:
    """Mark a function as `torch.compiler.assume_constant_result` does, without the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def real_object(x: Any) -> Any:
    """Return what torch.compile put a fake object in the place of, or x if it is none."""
    fake = _get("torch._library.fake_class_registry.FakeScriptObject")
    return x.real_obj if isinstance(x, fake) else x


def set_transform_refusal(operator: str, refusal: Callable[..., None]) -> None:
    """Make an operator call `refusal` under the transforms of torch.func."""
    key = "torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode"
    torch.library.impl(operator, _get(key).name)(refusal)


def below_autograd(operator: Any, keys: Any, arguments: tuple[Any, ...]) -> Any:
    """Return an operator's results for these dispatch keys but those of autograd."""
    with _get("torch._C._AutoDispatchBelowAutograd")():
        return operator.redispatch(keys & _get("torch._C._after_autograd_keyset"), *arguments)


def version_of(tensor: Tensor) -> int:
    """Return a number that grows when a tensor is written to; inference tensors have none."""
    return tensor._version


def process_groups() -> list[Any]:
    """Return all process groups that this process has made."""
    return list(_get("torch.distributed.distributed_c10d._world").pg_names)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return a process group's backend for a device."""
    return _get("torch.distributed.ProcessGroup._get_backend")(group, device)


def timeout_of(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of a process group's backend for a device."""
    return cast(timedelta, backend_of(group, device).options._timeout)


def start_coalescing(group: Any, device: torch.device) -> None:
    """Make what is posted from here to `end_coalescing` one operation."""
    _get("torch.distributed.ProcessGroup._start_coalescing")(group, device)


def end_coalescing(group: Any, device: torch.device) -> Any:
    """Post the operation; return its work."""
    return _get("torch.distributed.ProcessGroup._end_coalescing")(group, device)


def copy_options(backend: Any, options: Any) -> None:
    """Give `options`, of a backend on NCCL to be made, those of one that users made."""
    options.config, options._timeout = backend.options.config, backend.options._timeout


def group_of(backend: Any, store: Any, device: torch.device) -> Any:
    """Return a process group with this backend, on NCCL, for a device.

    torch does not know of it: whoever has it must shut it down.
    """
    group = torch.distributed.ProcessGroup(store, backend.rank(), backend.size())
    kind = torch.distributed.ProcessGroup.BackendType.NCCL
    _get("torch.distributed.ProcessGroup._register_backend")(group, device, kind, backend)
    return group


def base_of(x: Tensor) -> Tensor | None:
    """Return the tensor of which this one is a view; None if it is no view."""
    return x._base


def swap_contents(a: Tensor, b: Tensor) -> None:
    """Make `a` what `b` was, and the other way round; what autograd saved of them stays as it is.

    Setting `a.data` would change that too, and resizing `a` make backward refuse it.
    """
    _get("torch._C._swap_tensor_impl")(a, b)


def within_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.autograd.backward` or `grad` as one that does not ask torch's function modes.

    Called within a mode it runs there, and so does what backward computes again.
    """
    _get("torch.autograd.has_torch_function")
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    alike = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    alike.__kwdefaults__ = function.__kwdefaults__
    return alike


def flat_mesh(mesh: Any) -> Any:
    """Return a DeviceMesh of one dimension with all ranks of one with several."""
    return _get("torch.distributed.DeviceMesh._flatten")(mesh)


def calling_modules() -> list[Any]:
    """Return the modules whose calls run now in this thread, the innermost first."""
    code = _get("torch.nn.Module._call_impl").__code__
    frame, modules = inspect.currentframe(), list[Any]()
    while frame is not None:
        if frame.f_code is code:
            modules.append(frame.f_locals["self"])
        frame = frame.f_back
    return modules


def is_compiled(module: Any) -> bool:
    """Return whether a module was compiled, by torch.compile or by its method compile()."""
    compiled = vars(module).get("_compiled_call_impl")  # the method sets it
    return compiled is not None or type(module).__name__ == "OptimizedModule"


def runs_compiled() -> bool:
    """Return whether a caller of this function is what torch.compile made."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def parameters_in(module: Any) -> dict[str, Tensor | None]:
    """Return a module's own parameters by name: named_parameters takes ten times as long."""
    return cast(dict[str, Tensor | None], vars(module)["_parameters"])


def put_tensor(module: Any, name: str, tensor: Tensor) -> None:
    """Make a module use a tensor in the place of the parameter that has this name in it."""
    _get("torch.nn.utils._named_member_accessor.swap_tensor")(module, name, tensor)


def fsdp2_groups(module: Any) -> list[Any]:
    """Return the groups of parameters that FSDP2 shards together for a module."""
    state = _get("torch.distributed.fsdp.FSDPModule._get_fsdp_state")(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # before torch 2.12 a module had one at most
        groups = [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def fsdp2_names(group: Any) -> list[tuple[Any, str]]:
    """Return where the parameters of one of FSDP2's groups are: (module, name) of each."""
    places: list[tuple[Any, str]] = []
    for parameter in group.fsdp_params:
        info = getattr(parameter, "_module_info")  # noqa: B009 - a private name
        places.append((info.module, info.param_name))
        places += zip(info.shared_modules, info.shared_param_names, strict=True)
    return places


def fsdp2_tensors(group: Any) -> list[Any]:
    """Return what a call uses in the place of the parameters of one of FSDP2's groups."""
    return [getattr(parameter, "_unsharded_param", None) for parameter in group.fsdp_params]


def fsdp1_ignored(module: Any) -> set[Any]:
    """Return the parameters inside a FullyShardedDataParallel that it leaves alone."""
    return cast(set[Any], getattr(module, "_ignored_params", set()))


def ddp_parameters(ddp: Any) -> list[Any]:
    """Return the parameters whose gradients a DistributedDataParallel averages."""
    return cast(list[Any], getattr(ddp, "_module_parameters", list(ddp.module.parameters())))


def gradient_hooks(wrapped: Any) -> list[Any]:
    """Return the users' functions that reduce gradients in the place of DDP or FSDP."""
    hooks = [hook for hook, _ in getattr(wrapped, "_comm_hooks", ())]  # DDP
    names = ("_comm_hook", "_all_reduce_hook")  # FSDP1's module, and FSDP2's group
    hooks += [getattr(wrapped, name, None) for name in names]
    return [hook for hook in hooks if hook is not None]


def check_averaged(ddp: Any) -> None:
    """Raise a RuntimeError if DDP waits for gradients at the end of a backward."""
    _get("torch.nn.parallel.DistributedDataParallel._check_reducer_finalized")(ddp)


def has_hooks(x: Tensor) -> bool:
    """Return whether users read a parameter's gradient, or step its optimizer, in backward."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
    return any(getattr(x, name, None) for name in names)


def returned_by_grad(leaves: list[Tensor]) -> bool:
    """Return whether torch.autograd.grad runs now, and returns the gradient of one of the leaves.

    What DDP adds to leaves is then not called.
    """
    executes = _get("torch._C._will_engine_execute_node")
    for x in leaves:
        try:
            if executes(torch.autograd.graph.get_gradient_edge(x).node):
                return False
        except RuntimeError:  # by which torch says so
            return True
    return False


def in_backward() -> bool:
    """Return whether this thread runs a backward, in which checkpoints compute again."""
    return bool(_get("torch._C._current_graph_task_id")() != -1)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward that runs now is at its end."""
    _get("torch.autograd.Variable._execution_engine").queue_callback(function)


def dispatch_mode() -> Any:
    """Return the class of modes that are called with each operator."""
    return _get("torch.utils._python_dispatch.TorchDispatchMode")


def leaves_of(nested: Any) -> list[Any]:
    """Return what lists, tuples and dicts of an operator's values contain."""
    return cast(list[Any], _get("torch.utils._pytree.tree_leaves")(nested))


def memory_of(x: Tensor) -> int:
    """Return a number that tells a tensor's memory apart from others, also if it has no data."""
    return x.untyped_storage()._cdata


def unsafe_view() -> Any:
    """Return the operator of views that a matrix product makes of its result."""
    return _get("torch.ops.aten._unsafe_view")


@contextmanager
def beside_the_caller() -> Iterator[None]:
    """Compute where the caller's dispatch modes and hooks of saved tensors see nothing of it."""
    modes = _get("torch.utils._python_dispatch._disable_current_modes")
    with saved_tensors_hooks(lambda x: x, lambda x: x), modes():
        yield


def _kernel(name: str) -> Kernel:
    return cast(Kernel, _get(f"torch.ops.aten.{name}"))


@cache
def _get(name: str) -> Any:
    """Return what has this name, one of NAMES; raise a RuntimeError if it is gone."""
    found = _found(name)
    if found is None:
        since, why = NAMES[name]
        here = f"torch {torch.__version__} has no {name}"
        raise RuntimeError(f"{here} (torch had it in {since}), which seqpar uses: {why}")
    return found


def _found(name: str) -> Any | None:
    """Return what has this name, or None. Its module is imported if that is necessary."""
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


def fast_encoder_layer() -> Any:
    """Return the kernel of the fast path of nn.TransformerEncoderLayer, or None if it is gone."""
    return _found("torch._transformer_encoder_layer_fwd")


def inlined_only(function: T) -> T:
    """Let torch.compile trace a function where others call it, but not compile it by itself.

    A mode's `__torch_function__` that is compiled by itself, after a graph break, returns the value
    of one attribute for another one: its guards do not tell their getters apart.
    """
    strategy = _found("torch._C._dynamo.eval_frame._FrameExecStrategy")
    action = _found("torch._C._dynamo.eval_frame._FrameAction")
    set_strategy = _found("torch._C._dynamo.eval_frame.set_code_exec_strategy")
    if strategy and action and set_strategy:  # without them only graph breaks are not safe
        set_strategy(function.__code__, strategy(action.SKIP, action.DEFAULT))
    return function
