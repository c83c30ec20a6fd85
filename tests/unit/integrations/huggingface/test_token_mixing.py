"""Modules and hooks of a user's: refused if they mix tokens, and left as they are otherwise."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from seqpar.integrations import huggingface
from tests.support import huggingface as hf
from tests.support.ranks import virtual


class Around(nn.Module):
    """A module around another one, whose result becomes `change(self, result)`."""

    def __init__(self, inner, change, **modules):
        super().__init__()
        self.inner, self.change, self.calls, self.shapes = inner, change, 0, []
        self.register_buffer("ticks", torch.zeros(()))
        self.others = nn.ModuleDict(modules)

    def forward(self, x, **options):
        self.calls += 1
        self.shapes.append(x.shape)
        self.ticks += 1
        result = self.inner(x, **options)
        if isinstance(result, tuple):
            return (self.change(self, result[0]), *result[1:])
        return self.change(self, result)


class Head(nn.Module):
    """A module around a model, which returns `change(self, hidden states)`."""

    def __init__(self, model, change):
        super().__init__()
        self.model, self.change, self.score = model, change, nn.Linear(32, 3)

    def forward(self, **batch):
        states = self.model(**batch, output_hidden_states=True).hidden_states[-1]
        return self.change(self, states)


class Changed(transformers.LlamaForCausalLM):
    """A model whose forward is the user's own."""

    change = staticmethod(lambda x: x)

    def forward(self, input_ids=None, position_ids=None, **options):
        outputs = super().forward(input_ids, position_ids=position_ids, **options)
        outputs.logits = self.change(outputs.logits)
        return outputs


class Summed(Changed):
    change = staticmethod(lambda x: x.cumsum(1))


def around_mlp(change, **modules):
    def changed(model):
        model.model.layers[0].mlp = Around(model.model.layers[0].mlp, change, **modules)
        return model

    return changed


def around_block(change):
    def changed(model):
        model.model.layers[1] = Around(model.model.layers[1], change)
        return model

    return changed


def hooked(find, hook, before=False):
    def changed(model):
        module = find(model)
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        register(hook)
        return model

    return changed


def of_mlp(model):
    return model.model.layers[0].mlp


def centred(x):
    return x - x.mean(1, keepdim=True)


@torch.no_grad()
def centre_in_place(module, given, x):
    x -= x.mean(1, keepdim=True)


def by_channels(x):
    return x.transpose(1, 2)


def with_forward(model):
    own = model.model.norm.forward
    model.model.norm.forward = lambda x: own(x).flip(1)
    return model


def of_torch(model):
    inside = nn.Flatten(0, 1), nn.BatchNorm1d(32), nn.Unflatten(0, (1, -1))
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, *inside)
    return model


def with_class(kind):
    def changed(model):
        model.__class__ = kind
        return model

    return changed


def convolved(module, x):
    return by_channels(F.conv1d(F.pad(by_channels(x), (1, 0)), torch.ones(32, 1, 2), groups=32))


MIXING = {  # a change of the model -> what the refusal names
    "batch norm": (
        around_mlp(
            lambda self, x: by_channels(self.others["norm"](by_channels(x))),
            norm=nn.BatchNorm1d(32),
        ),
        "model.layers.0.mlp (Around) mixes tokens",
    ),
    "torch's batch norm": (of_torch, "model.layers.1.mlp.2 (BatchNorm1d) mixes tokens"),
    "running sum": (around_mlp(lambda _, x: x.cumsum(1)), "model.layers.0.mlp (Around)"),
    "running sum behind dropout": (
        around_mlp(lambda self, x: F.dropout(x, 0.5, self.training).cumsum(1)),
        "model.layers.0.mlp (Around)",
    ),
    "recurrence": (
        around_mlp(lambda self, x: self.others["gru"](x)[0], gru=nn.GRU(32, 32, batch_first=True)),
        "model.layers.0.mlp (Around)",
    ),
    "convolution": (around_mlp(convolved), "model.layers.0.mlp (Around)"),
    "group norm": (
        around_mlp(
            lambda self, x: by_channels(self.others["norm"](by_channels(x))),
            norm=nn.GroupNorm(4, 32),
        ),
        "model.layers.0.mlp (Around)",
    ),
    "mean in a block": (around_block(lambda _, x: centred(x)), "model.layers.1 (Around)"),
    "replaced forward": (with_forward, "model.norm (LlamaRMSNorm) mixes tokens"),
    "hook": (
        hooked(of_mlp, lambda _, given, x: centred(x)),
        "a hook of model.layers.0.mlp (<lambda>)",
    ),
    "hook in place": (
        hooked(of_mlp, centre_in_place),
        "a hook of model.layers.0.mlp",
    ),
    "hook before": (
        hooked(of_mlp, lambda _, given: (centred(given[0]),), before=True),
        "a hook of model.layers.0.mlp",
    ),
    "hook of the embeddings": (
        hooked(lambda model: model.get_input_embeddings(), lambda _, given, x: centred(x)),
        "a hook of model.embed_tokens",
    ),
    "model of the user's": (with_class(Summed), "the model (Summed) mixes tokens"),
    "last token": (lambda model: Head(model, lambda self, x: self.score(x[:, -1])), "(Head)"),
    "reward of the last token": (
        lambda model: Head(model, lambda self, x: self.score(x[:, -1])[:, 0]),
        "the model (Head) mixes tokens",
    ),
    "mean of a row": (lambda model: Head(model, lambda self, x: {"x": x.mean(1)}), "(Head)"),
    "differences": (lambda model: Head(model, lambda self, x: x[:, 1:] - x[:, :-1]), "(Head)"),
}


def batch_of(model):
    """A batch that the model takes; a module around the model is given no labels."""
    of = hf.batch()
    return of if isinstance(model, transformers.PreTrainedModel) else {"input_ids": of["input_ids"]}


@pytest.mark.parametrize("case", MIXING)
def test_code_that_mixes_tokens_is_refused(case):
    change, reason = MIXING[case]
    model = change(hf.tiny("LlamaForCausalLM"))

    def run(comm):
        own = copy.deepcopy(model)
        before = {name: vars(x).copy() for name, x in own.named_modules()}
        sp = huggingface.enable(own, comm)
        try:
            own(**sp.shard(batch_of(own)))
        finally:
            sp.disable()
            for name, x in own.named_modules():  # nothing of the check is left in the model
                assert ("forward" in vars(x)) == ("forward" in before[name])
                hooks = [
                    *vars(x)["_forward_hooks"].values(),
                    *vars(x)["_forward_pre_hooks"].values(),
                ]
                assert not any(y.__module__.startswith("seqpar.") for y in hooks)

    text = hf.refusal(run)
    assert text.startswith(reason) or (reason in text and "mixes tokens" in text), text
    assert "sp.unshard(outputs)" in text


def scaled(_, given, x):
    return 2 * x


EXACT = {
    "module": around_mlp(lambda _, x: 2 * x),
    "block": around_block(lambda _, x: 2 * x),
    "batch norm in evaluation": around_mlp(
        lambda self, x: by_channels(self.others["norm"](by_channels(x))),
        norm=nn.BatchNorm1d(32).eval(),
    ),
    "convolution of one token": around_mlp(
        lambda self, x: by_channels(self.others["conv"](by_channels(x))), conv=nn.Conv1d(32, 32, 1)
    ),
    "hook": hooked(of_mlp, scaled),
    "model of the user's": with_class(Changed),
}


@pytest.mark.parametrize("case", EXACT)
def test_code_that_computes_token_by_token_is_exact(case):
    """Called once more than the model is, for the check, and its buffers and numbers once."""
    model = EXACT[case](hf.tiny("LlamaForCausalLM"))
    hf.compare(model, hf.batch(), 2)

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        state = torch.random.get_rng_state()
        for calls in range(1, 4):
            own(**sp.shard(hf.batch()))
            for x in own.modules():
                if isinstance(x, Around):
                    assert (x.calls, len(x.shapes), float(x.ticks)) == (calls,) * 3
        assert torch.equal(torch.random.get_rng_state(), state)

    virtual(1, run)
    virtual(2, run)


RESULTS = {  # what a module around the model may return for the rank's tokens
    "by token": lambda self, x: self.score(x),
    "without rows": lambda self, x: {"scores": [self.score(x)[0]]},
    "some tokens": lambda self, x: self.score(x)[x[..., 0] > 0],
    "a mean": lambda self, x: self.score(x).mean(),
    "a sum": lambda self, x: self.score(x).sum()[None],
    "sums": lambda self, x: self.score(x).sum(1),
    "weights": lambda self, x: (self.score(x), self.score.weight),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_of_single_tokens_and_sums_are_accepted(case):
    model = Head(hf.tiny("LlamaForCausalLM"), RESULTS[case])

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        own(**sp.shard(batch_of(own)))

    virtual(2, run)


def test_dropout_is_left_out_of_the_check():
    """And the module draws the numbers that it draws without the check."""
    change = around_mlp(lambda self, x: F.dropout(x, 0.5, self.training))
    model = change(hf.tiny("LlamaForCausalLM"))

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        losses = []
        for _ in range(2):  # the first call is checked, the third is not
            torch.manual_seed(0)
            losses.append(own(**sp.shard(hf.batch())).loss)
            own(**sp.shard(hf.batch()))
        return losses

    ((first, third),) = virtual(1, run)
    assert torch.equal(first, third)
    virtual(2, run)


def test_a_hook_that_changes_nothing_is_called_once():
    seen = []
    model = hf.tiny("LlamaForCausalLM")

    def run(comm):
        own = copy.deepcopy(model)
        sp = huggingface.enable(own, comm)
        handle = of_mlp(own).register_forward_hook(lambda module, given, x: seen.append(comm.rank))
        own(**sp.shard(hf.batch()))
        handle.remove()
        own(**sp.shard(hf.batch()))

    virtual(2, run)
    assert sorted(seen) == [0, 1]


@pytest.mark.parametrize("find", [of_mlp, lambda model: model])
def test_a_hook_is_checked_within_as_many_calls_as_before_it(find):
    def run(comm):
        own = hf.tiny("LlamaForCausalLM")
        sp = huggingface.enable(own, comm)
        for _ in range(3):
            own(**sp.shard(hf.batch()))

        def hook(module, given, x):
            return x.logits[:, -1] if isinstance(x, dict) else centred(x)

        find(own).register_forward_hook(hook)
        own(**sp.shard(hf.batch()))

    assert "a hook of " in hf.refusal(run)


@pytest.mark.parametrize("ranks", [{0}, {1}])
def test_a_hook_on_one_rank_is_refused_on_all(ranks):
    model = hf.tiny("LlamaForCausalLM")

    def run(comm):
        own = copy.deepcopy(model)
        if comm.rank in ranks:
            of_mlp(own).register_forward_hook(lambda module, given, x: centred(x))
        sp = huggingface.enable(own, comm)
        own(**sp.shard(hf.batch()))

    assert "a hook of model.layers.0.mlp" in hf.refusal(run)


def test_a_prefill_is_checked():
    model = around_mlp(lambda _, x: x.cumsum(1))(hf.tiny("LlamaForCausalLM")).eval()

    def run(comm):
        own = copy.deepcopy(model)
        huggingface.enable(own, comm)
        own.generate(input_ids=hf.batch("whole")["input_ids"], max_new_tokens=2)

    assert hf.refusal(run).startswith("model.layers.0.mlp (Around) mixes tokens")


class Counting(nn.Module):
    """A layer with a bias that a hook increases."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return self.inner(x) + self.count


@pytest.mark.parametrize("agrees", [False, True])
def test_buffers_that_drift_apart_are_refused(agrees):
    model = hf.tiny("LlamaForCausalLM")
    model.model.layers[0].mlp = Counting(of_mlp(model))

    def run(comm):
        own = copy.deepcopy(model)
        layer = of_mlp(own)

        def count(module, given, x):
            seen = float(given[0].detach().abs().sum())
            if agrees:
                seen = sum(float(y) for y in comm.all_gather(torch.tensor([seen]), label="count"))
            layer.count += seen

        layer.register_forward_hook(count)
        sp = huggingface.enable(own, comm)
        for _ in range(3):
            own(**sp.shard(hf.batch()))

    if agrees:
        virtual(2, run)
    else:
        text = hf.refusal(run)
        assert "model.layers.0.mlp.count is not the same on rank 1 as on rank 0" in text, text
        assert "sum the change over the ranks" in text


def test_buffers_that_differ_from_the_start_may_differ():
    model = hf.tiny("LlamaForCausalLM")

    def run(comm):
        own = copy.deepcopy(model)
        of_mlp(own).register_buffer("rank", torch.tensor(comm.rank), persistent=False)
        sp = huggingface.enable(own, comm)
        own(**sp.shard(hf.batch()))

    virtual(2, run)
