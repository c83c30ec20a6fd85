"""Gradients of an enabled model, whoever averages them and whoever reads them: one process's."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.tiers import exhaustive_pairs, quickly

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' and torch's own

MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "experts": ("MixtralForCausalLM", {"num_local_experts": 16, "num_experts_per_tok": 1}),
}
FSDP1 = {
    "FSDP1": {"use_orig_params": True},
    "FSDP1 flat": {"use_orig_params": False},
    "FSDP1 layers": {"use_orig_params": True, "layers": True},
    "FSDP1 layers flat": {"use_orig_params": False, "layers": True},
}
FSDP2 = {
    "FSDP2": (True, True),
    "FSDP2 on layers": (True, False),
    "FSDP2 on the root": (False, True),
}
AVERAGING = ["FSDP2", "FSDP2 on the root"]  # "FSDP2 on layers" leaves parameters out
WRAPPERS = ["none", "DDP", *FSDP1, *AVERAGING]
RATE = 64.0


def build(name, way=""):
    kind, options = MODELS[name]
    model = hf.tiny(kind, **options)
    if way in ("a frozen base", "a frozen base in checkpoints"):
        for key, x in model.named_parameters():
            x.requires_grad_("q_proj" in key or "norm" in key)
    if way == "two dtypes":
        model.model.norm.to(torch.float64)
        model.model.norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        model.model.norm.register_forward_hook(lambda *args: args[2].float())
    if way in ("reentrant checkpoints", "a frozen base in checkpoints"):
        model.gradient_checkpointing_enable({"use_reentrant": True})
    if way == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def wrap(model, group, wrapper):
    """The model in what averages its gradients; it is enabled already."""
    if wrapper == "DDP":
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    if wrapper in FSDP1:
        options = dict(FSDP1[wrapper])
        blocks = {type(model.model.layers[0])}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=blocks)
        if options.pop("layers", False):
            options["auto_wrap_policy"] = policy
        return FullyShardedDataParallel(
            model, process_group=group, device_id=torch.device("cpu"), **options
        )
    if wrapper in FSDP2:
        mesh = DeviceMesh.from_group(group, "cpu")
        layers, root = FSDP2[wrapper]
        if layers:
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh) if root else model
    return model


def penalty(model, anchors):
    """Half the weights' squares, or those of their distance from anchors: EWC's."""
    pairs = zip(model.parameters(), anchors, strict=True)
    terms = [(x - y).square().sum() for x, y in pairs]
    return 0.05 * sum(x.full_tensor() if hasattr(x, "full_tensor") else x for x in terms)


def whole(x):
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return x.detach().clone()


def cross_entropy(logits, labels):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def train(model, outer, way, sp=None):
    """Gradients by name after one step of training in some way; `sp` is None on one process."""
    of, other = hf.batch("padded"), hf.batch("left")

    def call(batch=of, **options):
        return outer(**(batch if sp is None else sp.shard(batch)), **options)

    def labels_and_count(batch=of):
        if sp is None:
            shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            return shifted, int((shifted != -100).sum())
        return sp.shard(batch)["labels"], sp.count_labels(batch)

    def average():
        if sp is not None:
            sp.average_gradients()

    if way == "two backwards":
        call().loss.backward()
        call(other).loss.backward()
    elif way == "averages after each backward":
        call().loss.backward()
        average()
        call(other).loss.backward()
    elif way == "a penalty in its own backward":
        call().loss.backward()
        penalty(model, [0.0 for _ in model.parameters()]).backward()
    elif way == "two forwards":
        first, second = call().loss, call(other).loss
        (first + 2 * second).backward()
    elif way == "a graph that is kept":
        loss = call().loss
        loss.backward(retain_graph=True)
        loss.backward()
    elif way in ("a penalty of the weights", "a penalty of their distance"):
        by = [0.0 if way.endswith("weights") else 0.25 for _ in model.parameters()]
        (call().loss + penalty(model, by)).backward()
    elif way == "a loss with total":
        labels, count = labels_and_count()
        loss = cross_entropy(call().logits, labels) / count
        (loss if sp is None else sp.total(loss)).backward()
    elif way == "a head outside":
        labels, count = labels_and_count()
        hidden = call(output_hidden_states=True).hidden_states[-1]
        loss = cross_entropy(model.lm_head(hidden), labels) / count
        (loss if sp is None else sp.total(loss)).backward()
    elif way == "embeddings outside":
        embeddings = model.get_input_embeddings()(of["input_ids"])
        batch = {name: x for name, x in of.items() if name != "input_ids"}
        call(batch | {"inputs_embeds": embeddings}).loss.backward()
    elif way == "a failure before":
        with contextlib.suppress(ZeroDivisionError):
            handle = model.model.norm.register_forward_pre_hook(lambda *_: 1 / 0)
            call()
        handle.remove()
        call().loss.backward()
    elif way == "a checkpoint around a part":
        mlp = model.model.layers[0].mlp
        own = mlp.forward
        mlp.forward = lambda x: checkpoint(own, x, use_reentrant=True)
        call().loss.backward()
        del mlp.forward
    else:
        call().loss.backward()
    average()
    if isinstance(outer, FullyShardedDataParallel):  # which gives no gradients of flat parameters
        torch.optim.SGD(outer.parameters(), RATE).step()
        before = dict(build("llama").named_parameters())
        with FullyShardedDataParallel.summon_full_params(outer):
            after = {
                name.replace("_fsdp_wrapped_module.", ""): whole(x)
                for name, x in outer.module.named_parameters()
            }
        return {name: (x.detach() - after[name]) / RATE for name, x in before.items()}
    return {name: whole(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def on_rank(group, cells):
    """Each cell's gradients, or the error that refuses it."""
    results = []
    for name, wrapper, way in cells:
        model = build(name, way)
        sp = huggingface.enable(model, group)
        outer = wrap(model, group, wrapper)
        try:
            results.append(train(model, outer, way, sp))
        except ValueError as refused:
            results.append(str(refused))
    return results


def assert_right(pool, ranks, cells):
    expected = [train(model := build(name, way), model, way) for name, _, way in cells]
    for rank, results in enumerate(pool(ranks, on_rank, cells)):
        for cell, found, right in zip(cells, results, expected, strict=True):
            assert not isinstance(found, str), (cell, rank, found)
            assert found.keys() == right.keys(), (cell, rank, found.keys() ^ right.keys())
            for name, gradient in right.items():
                scale = max(float(gradient.abs().max()), 1e-3)
                error = float((found[name] - gradient).abs().max()) / scale
                assert error < 2e-5, (cell, rank, name, error)


WAYS = [
    "backward",
    "two backwards",
    "averages after each backward",
    "two forwards",
    "a graph that is kept",
    "a penalty of the weights",
    "a penalty of their distance",
    "a penalty in its own backward",
    "a loss with total",
    "a head outside",
    "embeddings outside",
    "a failure before",
    "a checkpoint around a part",
    "checkpoints",
    "reentrant checkpoints",
    "a frozen base",
    "a frozen base in checkpoints",
    "two dtypes",
]
ALIKE = ["backward", "two backwards", "a loss with total", "checkpoints"]  # in every wrapper


@pytest.mark.composes(
    "transformers",
    "FSDP1, with and without `use_orig_params`, and FSDP2",
    context=2,
    FSDP=2,
    equal="gradients",
)
@pytest.mark.parametrize("ways", [ALIKE[:1], pytest.param(ALIKE[1:], marks=pytest.mark.exhaustive)])
def test_gradients_are_right_whoever_averages(pool, ways):
    assert_right(pool, 2, [("llama", wrapper, way) for wrapper in WRAPPERS for way in ways])


@pytest.mark.exhaustive
def test_shared_weights_and_unused_experts_are_right(pool):
    cells = [
        (name, wrapper, way)
        for name in ("tied", "experts")
        for wrapper in ("none", "DDP", "FSDP2")
        for way in ("backward", "a frozen base")
    ]
    assert_right(pool, 2, cells)


def test_penalties_count_once_whoever_averages(pool):
    """FSDP2 has them in shards, and FSDP1 in flat parameters, of which users make their own."""
    ways = ["a penalty of the weights", "a penalty of their distance"]
    wrappers = ["none", "DDP", "FSDP2"]
    assert_right(pool, 2, [("llama", wrapper, way) for wrapper in wrappers for way in ways])


@pytest.mark.parametrize(
    ("name", "wrapper", "ranks"), exhaustive_pairs([*MODELS], ["none", "DDP"], [2, 4])
)
def test_every_way_is_right_for_every_model(pool, name, wrapper, ranks):
    outside = {"a head outside", "embeddings outside", "a failure before"}  # DDP is not called so
    again = {"a graph that is kept", "two forwards", "reentrant checkpoints"}  # nor does it
    again |= {"a frozen base in checkpoints"}  # reentrant ones too
    again |= {"a checkpoint around a part"}
    skipped = outside | again if wrapper == "DDP" else set()
    assert_right(pool, ranks, [(name, wrapper, way) for way in WAYS if way not in skipped])


def refusals(group, wrapper):
    """What a rank is told of losses that are wrong, or True where they are not refused."""
    told = []
    for way in ("local", "unsharded", "grad", "weight", "other head"):
        model = build("llama")
        sp = huggingface.enable(model, group)
        outer, of = wrap(model, group, wrapper), hf.batch("padded")
        local = sp.shard(of)
        outputs = outer(**local)
        other = torch.nn.Linear(64, 1)
        try:
            if way == "local":
                cross_entropy(outputs.logits, local["labels"]).backward()
            elif way == "unsharded":
                sp.unshard(outputs.logits, local).square().mean().backward()
            elif way == "grad":
                torch.autograd.grad(outputs.logits.sum(), [model.lm_head.weight])
            elif way == "weight":
                direct = outputs.logits.sum() + model.lm_head.weight.sum()
                sp.total(direct).backward()
            else:
                sp.total(other(outputs.logits).sum()).backward()
            told.append(True)
        except (ValueError, RuntimeError) as refused:
            told.append(str(refused))
        sp.disable()
    return told


def test_losses_of_one_rank_are_refused(pool):
    first, second = pool(2, refusals, "none")
    assert first == second
    assert all("loss must be the model's own, outputs.loss" in text for text in first[:3])
    assert first[3] is True  # a parameter of the model, which average_gradients averages
    assert "loss must not depend on a tensor" in first[4]
    assert "that is not the model's" in first[4]


@pytest.mark.parametrize("wrapper", quickly("DDP", "FSDP1", "FSDP2"))
def test_averaged_losses_of_one_rank_are_refused(pool, wrapper):
    for told in pool(2, refusals, wrapper):
        assert all("loss must be the model's own, outputs.loss" in text for text in told[:2])


def beside_the_loss(group, wrapper):
    """What a rank is told whose own terms are added to the model's loss."""
    told = []
    ways = ("local", "unsharded", "total of another output", "head", "embeddings")
    for way in (*ways, "gradients", "cache"):
        model = build("llama")
        sp = huggingface.enable(model, group)
        outer = wrap(model, group, wrapper)
        # Only without padding, hidden_states[0] is the first block's input itself.
        local = sp.shard(hf.batch("whole" if way == "embeddings" else "padded"))
        try:
            if way == "cache":
                ids = hf.batch()["input_ids"]
                model(input_ids=ids, past_key_values=sp.cache()).logits.sum().backward()
            outputs = outer(**local, output_hidden_states=True)
            logits, hidden = outputs.logits, outputs.hidden_states[1]
            if way == "local":
                term = logits.logsumexp(-1).square().mean()
            elif way == "unsharded":
                term = sp.unshard(logits, local).square().mean()
            elif way == "total of another output":
                term = sp.total(hidden.square().mean()) + logits.square().mean()
            elif way == "head":
                term = model.lm_head(outputs.hidden_states[-1]).square().mean()
            elif way == "embeddings":
                term = outputs.hidden_states[0].square().mean()
            if way == "gradients":
                outputs.loss.backward(create_graph=True)
            (outputs.loss + 0.1 * term).backward()
            told.append("")
        except ValueError as refused:
            told.append(str(refused))
        sp.disable()
    return told


@pytest.mark.parametrize("wrapper", ["none", "DDP", "FSDP2"])
def test_terms_of_one_rank_are_refused(pool, wrapper):
    for told in pool(2, beside_the_loss, wrapper):
        assert all("loss must be the model's own, outputs.loss" in text for text in told[:5])
        assert "create_graph must be False" in told[5]
        assert "past_key_values must be None where gradients are needed" in told[6]


UNDER_DDP = {  # what a rank is told whose DDP would leave its own part of a gradient
    "a graph that is kept": "loss.backward() must not be called again",
    "two forwards first": "loss.backward() must not be called again",
    "an unused parameter": "loss must reach all parameters in DDP",
}


def under_ddp(group):
    """What a rank is told for each of these ways, and its gradients where DDP does not average."""
    told = {}
    for way in UNDER_DDP:
        model = build("llama")
        sp = huggingface.enable(model, group)
        outer = DistributedDataParallel(model, process_group=group)
        of = hf.batch()
        if way == "an unused parameter":
            embeddings = torch.zeros(*of["input_ids"].shape, 32)
            of = {"inputs_embeds": embeddings, "labels": of["labels"]}
        loss = outer(**sp.shard(of)).loss
        try:
            if way == "two forwards first":
                second = outer(**sp.shard(of)).loss
                loss.backward()
                second.backward()
            else:
                loss.backward(retain_graph=True)
                loss.backward()
        except ValueError as refused:
            told[way] = str(refused)
        sp.disable()
    return told


def test_backwards_that_ddp_does_not_average_are_refused(pool):
    for told in pool(2, under_ddp):
        assert told.keys() == UNDER_DDP.keys()
        for way, text in UNDER_DDP.items():
            assert text in told[way], way


def bring(model, way):
    """Let a model's call use a trainable tensor in one of these ways; return the tensor."""
    own = torch.nn.Parameter(torch.full((32,), 0.1))
    layer, norm = model.model.layers[0], model.model.norm
    if way == "a forward hook":
        layer.register_forward_hook(lambda *args: args[2] + own)
    elif way == "a forward pre-hook":
        norm.register_forward_pre_hook(lambda _, args: (args[0] * own,))
    elif way == "another forward":
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x: forward(x) + own
    elif way == "the model's own, kept":
        kept = model.lm_head.weight
        norm.register_forward_hook(lambda *args: args[2] * kept.mean())
    elif way == "the model's own, read":
        norm.register_forward_hook(lambda *args: args[2] * model.lm_head.weight.mean())
    elif way == "a module's":
        norm.own = own
        norm.register_forward_hook(lambda *args: args[2] * norm.own)
    else:
        norm.register_forward_hook(lambda *args: args[2] + own.detach())
    return own


BROUGHT = {  # whether each is refused
    "a forward hook": True,
    "a forward pre-hook": True,
    "another forward": True,
    "the model's own, kept": False,
    "the model's own, read": False,
    "a module's": False,
    "a frozen one": False,
}


def brought_to(wrapper):
    """The ways for a wrapper: torch refuses a shard of FSDP2's that is kept for a call."""
    return [way for way in BROUGHT if (way, wrapper) != ("the model's own, kept", "FSDP2")]


def with_tensors(group, wrapper):
    """What a rank is told of each tensor that a hook brings into the model's call."""
    told = {}
    for way in brought_to(wrapper):
        model = build("llama")
        sp = huggingface.enable(model, group)
        if way == "a module's":
            bring(model, way)
        outer = wrap(model, group, wrapper)
        if way != "a module's":
            bring(model, way)
        try:
            outer(**sp.shard(hf.batch())).loss.backward()
            sp.average_gradients()
            told[way] = {name: whole(x.grad) for name, x in model.named_parameters()}
        except ValueError as refused:
            told[way] = str(refused)
        sp.disable()
    return told


@pytest.mark.parametrize("wrapper", quickly("none", "DDP", "FSDP2"))
def test_a_hooks_own_trainable_tensors_are_refused(pool, wrapper):
    for told in pool(2, with_tensors, wrapper):
        for way in brought_to(wrapper):
            if BROUGHT[way]:
                assert "model must not use" in told[way] and "in its call" in told[way], way
                continue
            model = build("llama")
            bring(model, way)
            model(**hf.batch()).loss.backward()
            expected = {name: x.grad for name, x in model.named_parameters()}
            assert told[way].keys() == expected.keys()
            for name, x in expected.items():
                torch.testing.assert_close(told[way][name], x, rtol=1e-4, atol=2e-5)


def of_two_models(group, wrappers):
    """A rank's gradients of one term of two models' logits; `group` is None on one process."""
    models = [build("llama"), build("tied")]
    if group is None:
        outputs = [model(**hf.batch()).logits[hf.real(hf.batch())] for model in models]
        (outputs[0] - outputs[1]).square().sum().backward()
    else:
        sps = [huggingface.enable(model, group) for model in models]
        outers = [wrap(*pair) for pair in zip(models, (group, group), wrappers, strict=True)]
        outputs = [
            outer(**sp.shard(hf.batch())).logits for outer, sp in zip(outers, sps, strict=True)
        ]
        sps[0].total((outputs[0] - outputs[1]).square().sum()).backward()
        for sp in sps:
            sp.average_gradients()
    return [whole(x.grad) for model in models for x in model.parameters()]


@pytest.mark.parametrize("wrappers", [("none", "none"), ("DDP", "none"), ("none", "FSDP2")])
def test_a_term_of_two_models_is_right(pool, wrappers):
    expected = of_two_models(None, wrappers)
    for grads in pool(2, of_two_models, wrappers):
        for x, right in zip(grads, expected, strict=True):
            close = {"rtol": 0, "atol": 2e-5 * max(float(right.abs().max()), 1e-3)}
            torch.testing.assert_close(x, right, **close)


def misled(group, wrapper):
    """What a rank is told of backwards whose gradients would differ from one process's."""
    told = {}
    for way in [*MISLED, *UNWRAPPED]:
        model = build("llama")
        sp = huggingface.enable(model, group)
        outer = wrap(model, group, wrapper)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        local = sp.shard(hf.batch())

        def call(way=way, sp=sp, outer=outer, local=local, optimizer=optimizer, model=model):
            if way == "scaled by the rank":
                (outer(**local).loss * (1 + group.rank())).backward()
            elif way == "a total scaled by the rank":
                (sp.total(outer(**local).logits.sum()) * (1 + group.rank())).backward()
            elif way == "logits in a reentrant checkpoint":
                one = torch.ones((), requires_grad=True)
                logits = checkpoint(lambda x: outer(**local).logits * x, one, use_reentrant=True)
                sp.total(logits.sum()).backward()
            elif way == "a reentrant checkpoint without total":
                one = torch.ones((), requires_grad=True)
                logits = checkpoint(lambda x: outer(**local).logits * x, one, use_reentrant=True)
                logits.sum().backward()
            elif way == "a step without an average":
                outer(**local).loss.backward()
                optimizer.step()
            elif way == "a step after an average":
                outer(**local).loss.backward()
                sp.average_gradients()
                optimizer.step()
            elif way == "a closure without an average":
                optimizer.step(lambda: outer(**local).loss.backward())
            elif way == "a step after disable":
                outer(**local).loss.backward()
                sp.disable()
                del sp
                optimizer.step()
            elif way == "gradients zeroed in place":
                outer(**local).loss.backward()
                optimizer.zero_grad(set_to_none=False)
                model.lm_head.weight.requires_grad_(False)
                outer(**local).loss.backward()
                sp.average_gradients()
                optimizer.step()
            elif way == "an average in no_sync":
                with outer.no_sync() if wrapper == "DDP" else contextlib.nullcontext():
                    outer(**local).loss.backward()
                sp.average_gradients()
            elif way == "an optimizer in backward":
                for x in model.parameters():
                    step = torch.optim.SGD([x], 1.0).step
                    x.register_post_accumulate_grad_hook(lambda _, step=step: step())
                outer(**local).loss.backward()
            elif way == "clipped before the average":
                outer(**local).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                sp.average_gradients()
            elif way == "clipped between two backwards":
                outer(**local).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                outer(**local).loss.backward()
            elif way == "clipped after the average":
                outer(**local).loss.backward()
                sp.average_gradients()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                sp.average_gradients()
                optimizer.step()

        told[way] = hf.refused(call)
        sp.disable()
    return told


MISLED = {
    "scaled by the rank": "loss must be multiplied by the same number on all ranks",
    "a total scaled by the rank": "loss must be multiplied by the same number on all ranks",
    "logits in a reentrant checkpoint": "use_reentrant must be False for a checkpoint around",
    "a reentrant checkpoint without total": "use_reentrant must be False for a checkpoint around",
}
UNWRAPPED = {  # what is wrong only where nobody averages
    "a closure without an average": "call sp.average_gradients() after backward",
    "a step after disable": "call sp.average_gradients() after backward",
    "gradients zeroed in place": None,
    "an average in no_sync": None,
    "a step without an average": "call sp.average_gradients() after backward",
    "a step after an average": None,
    "an optimizer in backward": "optimizer must not step in backward",
    "clipped before the average": "was clipped or replaced; average first",
    "clipped between two backwards": "was clipped or replaced; average first",
    "clipped after the average": None,
}


@pytest.mark.parametrize("wrapper", quickly("DDP", "none", "FSDP2"))
def test_misleading_backwards_are_refused(pool, wrapper):
    for told in pool(2, misled, wrapper):
        for way, text in MISLED.items():
            assert text in (told[way] or "nothing"), way
        for way, text in UNWRAPPED.items():
            if way == "an average in no_sync" and wrapper == "DDP":
                assert "gradients must not be averaged now" in told[way]
            elif wrapper != "none" or text is None:
                assert told[way] is None, way
            else:
                assert text in (told[way] or "nothing"), way


LEFT_OUT = {
    "FSDP2 on layers": "parameters that FSDP leaves out, got model.embed_tokens.weight",
    "DDP before": "DDP leaves out: 21 are trainable, and 20 were when DDP was made",
    "DDP on a part": "parameters that DDP leaves out, got model.layers.0.self_attn.q_proj.weight",
    "FSDP1 with ignored parameters": "parameters that FSDP leaves out, got lm_head.weight",
}


def left_out(group):
    """What a rank is told whose wrapper leaves trainable parameters out, then frozen ones."""
    told = {}
    for way in LEFT_OUT:
        for frozen in (False, True):
            model = build("llama")
            sp = huggingface.enable(model, group)
            if way == "DDP on a part":
                rest = [x for name, x in model.named_parameters() if "layers.0" in name]
                names = {name for name, _ in model.named_parameters() if "layers.0" in name}
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
                outer = wrap(model, group, "DDP")
            elif way == "DDP before":
                rest = [model.lm_head.weight.requires_grad_(False)]
                outer = wrap(model, group, "DDP")
            elif way == "FSDP2 on layers":
                outer = wrap(model, group, way)
                rest = [model.model.embed_tokens.weight, model.model.norm.weight]
                rest.append(model.lm_head.weight)
            else:
                rest = [model.lm_head.weight]
                outer = FullyShardedDataParallel(
                    model,
                    process_group=group,
                    device_id=torch.device("cpu"),
                    use_orig_params=True,
                    ignored_states=rest,
                )
            for x in rest:
                x.requires_grad_(not frozen)
            told[way, frozen] = hf.refused(
                lambda: outer(**sp.shard(hf.batch())).loss.backward()  # noqa: B023
            )
            sp.disable()
    return told


def test_parameters_that_a_wrapper_leaves_out_are_refused(pool):
    for told in pool(2, left_out):
        for way, text in LEFT_OUT.items():
            assert text in (told[way, False] or "nothing"), way
            assert told[way, True] is None, way


def sums(state, bucket):
    """A comm hook that sums gradients and does not average them."""
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


HOOKS = {"sums": sums, "noop_hook": noop_hook, "allreduce_hook": None, "fp16_compress_hook": None}


def with_hooks(group):
    """What a rank is told of each comm hook of DDP."""
    told = {}
    for name, hook in HOOKS.items():
        model = build("llama")
        sp = huggingface.enable(model, group)
        outer = wrap(model, group, "DDP")
        outer.register_comm_hook(group, hook or getattr(default_hooks, name))
        told[name] = hf.refused(lambda: outer(**sp.shard(hf.batch())).loss.backward())  # noqa: B023
        sp.disable()
    return told


def test_comm_hooks_that_do_not_average_are_refused(pool):
    for told in pool(2, with_hooks):
        for name, hook in HOOKS.items():
            text = f"DDP must average gradients over all ranks of the group: its comm hook {name}"
            assert told[name] is None if hook is None else text in told[name]


def divided(group):
    """What a rank is told whose FSDP sums."""
    model = build("llama")
    sp = huggingface.enable(model, group)
    wrap(model, group, "FSDP2").set_gradient_divide_factor(1.0)
    return hf.refused(lambda: model(**sp.shard(hf.batch())))


@pytest.mark.composes(
    "transformers",
    "do not set a divisor other than the number of ranks",
    context=2,
    FSDP=2,
    refused="FSDP must average gradients over all ranks of the group",
)
def test_fsdp_that_does_not_average_is_refused(pool):
    for told in pool(2, divided):
        assert "FSDP must average gradients over all ranks of the group" in told


TERMS = {  # of outputs; each is 0 for a row of zeros
    "the sum of logits": lambda o, _: o.logits.sum() / 9,
    "squares of logits": lambda o, _: o.logits.square().sum(),
    "hidden states": lambda o, _: sum(x.abs().sum() for x in o.hidden_states) / 9,
    "a head on hidden states": lambda o, model: model.lm_head(o.hidden_states[-1]).abs().sum(),
    "two terms and the loss": lambda o, _: o.logits.sum() / 9 + o.hidden_states[1].square().sum(),
}
CALLS = ("plain", "a checkpoint around the call", "a reentrant checkpoint around the call")


def terms(model, outer, term, way, sp=None):
    """The loss of a term of two calls' outputs, and its gradients; one backward follows both.

    On one process, tokens of padding are taken out of outputs.
    """

    def outputs_of(batch):
        outputs = outer(**batch, output_hidden_states=True)
        if sp is not None:
            return outputs
        kept = hf.real(batch)
        outputs["logits"] = outputs.logits[kept]
        outputs["hidden_states"] = tuple(x[kept] for x in outputs.hidden_states)
        return outputs

    def value(batch):
        outputs = outputs_of(batch)
        local = TERMS[term](outputs, model)
        total = local if sp is None else sp.total(local)
        return total + outputs.loss if term == "two terms and the loss" else total

    def call(batch):
        batch = batch if sp is None else sp.shard(batch)
        if way == "plain":
            return value(batch)
        started = torch.ones((), requires_grad=True)  # reentrant ones need it
        reentrant = way.startswith("a reentrant")
        return checkpoint(lambda one: value(batch) * one, started, use_reentrant=reentrant)

    batches = [hf.batch(kind, columns=21) for kind in ("padded", "left")]  # 35 tokens each
    first, second = map(call, batches)
    loss = first + 2 * second
    loss.backward()
    if sp is not None:
        sp.average_gradients()
    grads = {n: whole(x.grad) for n, x in model.named_parameters() if x.grad is not None}
    return loss.detach(), grads


def with_terms(group, cells):
    results = []
    for wrapper, term, way in cells:
        model = build("llama")
        sp = huggingface.enable(model, group)
        results.append(terms(model, wrap(model, group, wrapper), term, way, sp))
        sp.disable()
    return results


def assert_terms_are_right(pool, cells):
    for cell, *results in zip(cells, *pool(2, with_terms, cells), strict=True):
        model = build("llama")
        loss, expected = terms(model, model, *cell[1:])
        for total, found in results:
            torch.testing.assert_close(total, loss, rtol=1e-5, atol=1e-5, msg=str(cell))
            for name, x in found.items():
                right = expected.get(name, torch.zeros_like(x))  # DDP has zeros for None
                close = {"rtol": 0, "atol": 2e-5 * max(float(right.abs().max()), 1e-3)}
                torch.testing.assert_close(x, right, **close, msg=f"{cell} {name}")
            assert expected.keys() <= found.keys()


def dealt(rows):
    """Some of the rows for each wrapper, all of them in turn; the others are exhaustive."""
    wrappers = ["none", "DDP", "FSDP2"]
    for i, wrapper in enumerate(wrappers):
        quick = rows[i :: len(wrappers)]
        others = [row for row in rows if row not in quick]
        yield wrapper, quick
        yield pytest.param(wrapper, others, marks=pytest.mark.exhaustive)


PLAIN = [(term, "plain") for term in TERMS]
CHECKPOINTED = [(term, way) for term in [*TERMS][:3] for way in CALLS[1:]]


@pytest.mark.parametrize(("wrapper", "rows"), list(dealt(PLAIN)))
def test_repeated_calls_and_terms_of_outputs_are_right(pool, wrapper, rows):
    skipped = ("a head on hidden states",) if wrapper in ("DDP", "FSDP2") else ()
    assert_terms_are_right(pool, [(wrapper, x, way) for x, way in rows if x not in skipped])


@pytest.mark.parametrize(("wrapper", "rows"), list(dealt(CHECKPOINTED)))
def test_checkpoints_around_calls_are_right(pool, wrapper, rows):
    assert_terms_are_right(pool, [(wrapper, *row) for row in rows])


class Engine(torch.nn.Module):
    """A stand-in for DeepSpeed's engine."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, **batch):
        return self.module(**batch)


def with_deepspeed(group):
    """What a rank is told whose model is in DeepSpeed's engine."""
    model = build("llama")
    sp = huggingface.enable(model, group)
    kind = type("DeepSpeedEngine", (Engine,), {"__module__": "deepspeed.runtime.engine"})
    return hf.refused(lambda: kind(model)(**sp.shard(hf.batch())))


@pytest.mark.composes(
    "transformers",
    "wrap the model in FSDP or DDP instead of DeepSpeed's engine",
    context=2,
    FSDP=2,
    refused="model must not be in a DeepSpeed engine",
)
def test_deepspeeds_engine_is_refused(pool):
    for told in pool(2, with_deepspeed):
        assert "model must not be in a DeepSpeed engine" in told


def with_other_weights(group, name, change):
    """What a rank is told whose weights differ from rank 0's in one number."""
    model = build("llama")
    with torch.no_grad():
        x = dict(model.named_parameters())[name].flatten()
        if group.rank() and change == "one bit":
            x[3] = torch.nextafter(x[3], torch.tensor(9.0))
        if group.rank() and change == "an order":
            x[[0, 1024]] = x[[1024, 0]]
    return hf.refused(lambda: huggingface.enable(model, group))


@pytest.mark.parametrize("change", ["one bit", "an order", None])
def test_enabling_compares_weights(pool, change):
    name = "model.layers.1.mlp.up_proj.weight"
    for told in pool(2, with_other_weights, name, change):
        assert told is None if change is None else f"{name} is not the same on rank 1" in told
