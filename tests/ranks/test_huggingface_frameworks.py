"""Enabled models in frameworks that rebuild, cast or move the arguments and outputs of a call."""

import collections.abc
import copy
import dataclasses
import functools

import accelerate
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from seqpar.integrations import huggingface
from tests.support import generation, images
from tests.support import huggingface as hf
from tests.support.tiers import exhaustive_pairs, quickly

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers', accelerate's and torch's own
RATE = 64.0


def encoder():
    return hf.tiny("BartForConditionalGeneration", **hf.BART)


MODELS = {  # a model, its batch, and the lists of its blocks
    "llama": (functools.partial(hf.tiny, "LlamaForCausalLM"), hf.batch, ["model.layers"]),
    "bart": (encoder, hf.batch, ["model.encoder.layers", "model.decoder.layers"]),
    "gemma3": (
        functools.partial(images.build, "gemma3", mm_tokens_per_image=4),
        functools.partial(images.batch, "left", "types", 4),
        ["model.language_model.layers"],
    ),
}


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def blocks_of(model, lists):
    return [block for name in lists for block in model.get_submodule(name)]


def fsdp2(model, group, lists, dtype, **options):
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, **options)
    for block in blocks_of(model, lists):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp1(model, group, lists, dtype, **options):
    kinds = {type(block) for block in blocks_of(model, lists)}
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=kinds)
    return FullyShardedDataParallel(
        model,
        process_group=group,
        device_id=torch.device("cpu"),
        use_orig_params=True,
        auto_wrap_policy=policy,
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, **options),
    )


WRAPPERS = {
    "FSDP2": fsdp2,
    "FSDP2, inputs as they are": functools.partial(fsdp2, cast_forward_inputs=False),
    "FSDP2, outputs in fp32": functools.partial(fsdp2, output_dtype=torch.float32),
    "FSDP1": fsdp1,
    "FSDP1, inputs of blocks too": functools.partial(fsdp1, cast_forward_inputs=True),
}
ORDERS = "enabled first", "wrapped first"


def gradients_of(model, outer, make):
    """Gradients by name; under FSDP1 from a step of an optimizer, because they are in shards."""
    if not isinstance(outer, FullyShardedDataParallel):
        return {name: whole(x) for name, x in hf.gradients(model).items()}
    before = dict(make().named_parameters())
    torch.optim.SGD(outer.parameters(), RATE).step()
    with FullyShardedDataParallel.summon_full_params(outer):
        after = {
            name.replace("_fsdp_wrapped_module.", ""): whole(x)
            for name, x in outer.named_parameters()
        }
    return {name: (before[name].detach() - x) / RATE for name, x in after.items()}


def steps(group, cells, dtype):
    """Loss, logits and gradients of each cell (model, wrapper, order) on a rank."""
    results = []
    for name, wrapper, order in cells:
        make, make_batch, lists = MODELS[name]
        model, of = make(), make_batch()
        sp = huggingface.enable(model, group) if order == ORDERS[0] else None
        outer = WRAPPERS[wrapper](model, group, lists, dtype)
        sp = sp or huggingface.enable(outer, group)
        local = sp.shard(of)
        outputs = outer(**local)
        outputs.loss.backward()
        sp.average_gradients()
        logits = sp.unshard(outputs.logits, local).detach()
        results.append((outputs.loss.detach(), logits, gradients_of(model, outer, make)))
    return results


def alone(name, dtype):
    """The same of an unmodified model whose parameters have this dtype."""
    make, make_batch, _ = MODELS[name]
    of = {key: x.to(dtype) if x.is_floating_point() else x for key, x in make_batch().items()}
    return hf.unmodified(make().to(dtype), of), hf.real(of)


def assert_same(found, expected, kept):
    """As `hf.assert_same`, in whatever dtype; FSDP has zeros for parameters without a gradient."""
    loss, logits, grads = expected
    zeros = {name: torch.zeros_like(x) for name, x in found[2].items() if name not in grads}
    found = found[0].to(loss), found[1].to(logits), {n: x.double() for n, x in found[2].items()}
    wide = {name: x.double() for name, x in (zeros | grads).items()}
    hf.assert_same([found], (loss, logits, wide), kept)


QUICK = [("llama", "FSDP2", order) for order in ORDERS] + [("llama", "FSDP1", ORDERS[0])]
MORE = [
    *(("llama", wrapper, order) for wrapper in WRAPPERS for order in ORDERS),
    *((name, wrapper, ORDERS[0]) for name in MODELS for wrapper in ("FSDP2", "FSDP1")),
]


@pytest.mark.composes(
    "transformers",
    "mixed precision of FSDP1 and FSDP2",
    context=2,
    FSDP=2,
    equal="loss, logits and gradients",
)
@pytest.mark.parametrize("cells", [QUICK, pytest.param(MORE, marks=pytest.mark.exhaustive)])
def test_mixed_precision_of_fsdp_is_one_process_in_that_precision(pool, cells):
    """In fp64, because rounding would hide other faults of a policy that casts to bf16."""
    for results in pool(2, steps, cells, torch.float64):
        for (name, *_), found in zip(cells, results, strict=True):
            assert_same(found, *alone(name, torch.float64))


def test_fsdp2_in_bf16_has_the_loss_of_fp32(pool):
    cells = [("llama", "FSDP2", order) for order in ORDERS]
    (exact, *_), _ = alone("llama", torch.float32)
    for results in pool(2, steps, cells, torch.bfloat16):
        for loss, *_ in results:
            assert abs(loss - exact) < 2**-8 * exact  # bf16 has 8 bits


def tokens_of(model):
    found = generation.generated(model, generation.prompts((0, 7)))
    return type(found)(sequences=found.sequences, logits=found.logits)  # without the cache


def generate(group, order):
    model = hf.tiny("LlamaForCausalLM").eval()
    if order == ORDERS[0]:
        huggingface.enable(model, group)
    outer = fsdp2(model, group, ["model.layers"], torch.float64)
    if order == ORDERS[1]:
        huggingface.enable(outer, group)
    return tokens_of(outer)


@pytest.mark.parametrize("order", quickly(*ORDERS))
def test_generation_under_fsdp2s_mixed_precision_is_right(pool, order):
    model = hf.tiny("LlamaForCausalLM").eval().double()
    expected = tokens_of(model)
    results = pool(4, generate, order)  # transformers ends together with all processes
    for found in results:
        generation.assert_same(found, expected, results[0])


def applied(data, kind, function):
    """What Lightning's `apply_to_collection` makes of the arguments and outputs of a call."""
    if isinstance(data, kind):
        return function(data)
    if dataclasses.is_dataclass(data):
        made = copy.copy(data)
        for field in dataclasses.fields(data):
            setattr(made, field.name, applied(getattr(data, field.name), kind, function))
        return made
    if isinstance(data, collections.abc.Mapping):
        return type(data)({name: applied(x, kind, function) for name, x in data.items()})
    if isinstance(data, list | tuple):
        return type(data)(applied(x, kind, function) for x in data)
    return data


def cast(dtype):
    return lambda x: x.to(dtype) if x.is_floating_point() else x


class Fabric(torch.nn.Module):
    """A stand-in for the module that Lightning's Fabric makes for its "true" precisions."""

    def __init__(self, module, dtype):
        super().__init__()
        self.module, self.dtype = module.to(dtype), dtype

    def forward(self, **kwargs):
        outputs = self.module(**applied(kwargs, torch.Tensor, cast(self.dtype)))
        return applied(outputs, torch.Tensor, cast(torch.float32))


class _HasTo(type):
    def __instancecheck__(cls, x):
        return callable(getattr(type(x), "to", None))


class Movable(metaclass=_HasTo):
    """What Fabric moves to a device: any object with a method `to`."""


def in_fabric(group, order):
    model = hf.tiny("LlamaForCausalLM")
    sp = huggingface.enable(model, group) if order == ORDERS[0] else None
    outer = Fabric(model, torch.float64)
    sp = sp or huggingface.enable(outer, group)
    local = applied(sp.shard(hf.batch()), Movable, lambda x: x.to("cpu"))
    outputs = outer(**local)
    outputs.loss.backward()
    sp.average_gradients()
    return outputs.loss.detach(), sp.unshard(outputs.logits, local).detach(), hf.gradients(model)


@pytest.mark.parametrize("order", ORDERS)
def test_lightnings_fabric_computes_one_process(pool, order):
    for found in pool(2, in_fabric, order):
        assert_same(found, *alone("llama", torch.float64))


def test_the_stand_in_walks_as_lightning():
    """Also where it refuses: a frozen dataclass."""
    theirs = pytest.importorskip("lightning_utilities.core.apply_func").apply_to_collection

    @dataclasses.dataclass
    class Open:
        x: torch.Tensor

    frozen = dataclasses.dataclass(frozen=True)(type("Frozen", (), {"__annotations__": {"x": int}}))
    outputs = hf.tiny("LlamaForCausalLM")(**hf.batch(), output_hidden_states=True)
    for data in ({"a": Open(torch.ones(2)), "b": [1, (torch.ones(1),)]}, outputs):
        for kind, function in (
            (torch.Tensor, cast(torch.float64)),
            (Movable, lambda x: x.to("cpu")),
        ):
            found = applied(data, kind, function)
            right = theirs(data, kind, function)
            assert type(found) is type(right) and str(found) == str(right)
    for walk in (applied, theirs):
        with pytest.raises((ValueError, AttributeError), match=r"frozen|assign"):
            walk({"a": frozen(1)}, torch.Tensor, cast(torch.float64))


def offload(model, folder):
    """One layer in memory, one on disk, and the rest loaded when it runs."""
    if folder is None:
        return accelerate.cpu_offload(model, execution_device="cpu")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
    places |= {"lm_head": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    return accelerate.dispatch_model(
        model, places, main_device="cpu", force_hooks=True, offload_dir=folder
    )


def offloaded(group, name, order, folder):
    """Loss, logits, gradients and generated tokens of a model with accelerate's device hooks."""
    model = MODELS[name][0]()
    of = hf.batch()
    if group is None:
        outer = offload(model, folder)
        outputs = outer(**of)
        logits = outputs.logits
    else:
        sp = huggingface.enable(model, group) if order == ORDERS[0] else None
        outer = offload(model, folder and f"{folder}{group.rank()}")
        sp = sp or huggingface.enable(outer, group)
        outputs = outer(**sp.shard(of))
        logits = sp.unshard(outputs.logits)
    outputs.loss.backward()
    if group is not None:
        sp.average_gradients()
    found = outputs.loss.detach(), logits.detach(), hf.gradients(model)
    if name == "bart":
        return found, None
    with torch.no_grad():
        return found, tokens_of(outer.eval())


@pytest.mark.parametrize(
    ("name", "order", "disk"),
    [
        ("llama", ORDERS[0], False),
        *exhaustive_pairs(["llama"], ORDERS, [True]),
        *exhaustive_pairs(["bart"], ORDERS, [False]),
    ],
)
def test_accelerates_offloading_computes_one_process(pool, tmp_path, name, order, disk):
    """Offloaded weights get no gradients, as in one process."""
    folder = str(tmp_path / "weights") if disk else None
    expected, tokens = offloaded(None, name, order, folder)
    results = pool(2, offloaded, name, order, folder)
    for found, own_tokens in results:
        hf.assert_same([found], expected, hf.real(hf.batch()))
        if tokens is not None:
            generation.assert_same(own_tokens, tokens, results[0][1])


def observed(group):
    """What a hook reads of the arguments of layers: shapes and devices, where these exist."""
    model, found = hf.tiny("LlamaForCausalLM"), []
    sp = huggingface.enable(model, group)
    read = lambda x: (hasattr(x, "to"), getattr(x, "shape", None))  # noqa: E731
    model.model.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: found.append(read(kwargs["attention_mask"])), with_kwargs=True
    )
    model(**sp.shard(hf.batch()))
    return found


def test_a_hook_may_ask_whether_a_mask_is_a_tensor(pool):
    assert pool(2, observed) == [[(True, None)]] * 2
