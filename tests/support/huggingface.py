"""Tiny models of transformers, batches for them, and the results of unmodified models."""

import copy
import os
import threading

import pytest
import torch
import torch.distributed as dist
import transformers

from seqpar.integrations import huggingface
from seqpar.integrations.huggingface.model.layers import loss_shifts
from tests.support.ranks import virtual

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BUILDING = threading.Lock()  # virtual ranks are threads that share one random generator
LENGTHS = (9, 1, 12)  # tokens of each document of a packed batch

BART = {  # options of a tiny model with an encoder
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "decoder_start_token_id": 2,
}


def tiny(name, **options):
    """Make a model of transformers from the name of its class, with random weights, in training
    mode."""
    kind = getattr(transformers, name)
    sizes = SIZES | options
    known = {*kind.config_class.__dataclass_fields__, *(kind.config_class.attribute_map or ())}
    config = kind.config_class(**{x: y for x, y in sizes.items() if x in known})
    with _BUILDING:
        torch.manual_seed(0)
        return kind(config).train()


def batch(kind="padded", rows=2, columns=22):
    """Make a batch as transformers' collators do: without padding, padded left or right, or packed.

    With "sides", the first row is padded left and the last row is padded right.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        3, VOCABULARY, (1 if kind == "packed" else rows, columns), generator=generator
    )
    if kind == "packed":
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        labels = ids.clone()
        labels[positions == 0] = -100
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    mask = torch.ones_like(ids)
    if kind in ("padded", "sides"):
        mask[-1, -7:] = 0
    if kind in ("left", "sides"):
        row = -1 if kind == "left" else 0
        mask[row, :7] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if kind in ("left", "sides"):  # the label of the token after padding would belong to padding
        labels[row, 7] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def launched(group):
    """Set the environment variables that torchrun would set, for a process of the pool."""
    rank = dist.get_rank(group)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group.size())}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}


def with_hole(of):
    """Return the batch with padding between the tokens of a row."""
    mask = of["attention_mask"].clone()
    mask[0, 5] = 0
    return of | {"attention_mask": mask}


def refusal(run, ranks=2):
    """Assert that all virtual ranks raise the same ValueError, and return its text."""

    def on_each(comm):
        with pytest.raises((ValueError, TypeError)) as refused:
            run(comm)
        return str(refused.value)

    (text,) = set(virtual(ranks, on_each))
    return text


def refused(call):
    """Return the text of the call's ValueError, or None if the call raises none."""
    try:
        call()
    except ValueError as refusal:
        return str(refusal)


def real(of):
    """Return (B, S): whether each token of a batch is a real token, not padding."""
    return of.get("attention_mask", torch.ones_like(of["input_ids"])).bool()


def gradients(model):
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def alone(model, of):
    """Return (loss, logits) of the unmodified model, with each document of a packed batch alone.

    Transformers separates the documents only in some models, and never while the model uses a
    cache.
    """
    if "position_ids" not in of:
        outputs = model(**of)
        return outputs.loss, outputs.logits
    shifts, losses, logits, count = loss_shifts(model), [], [], 0
    for part in torch.arange(sum(LENGTHS)).split(LENGTHS):
        outputs = model(**{name: x[:, part] for name, x in of.items()})
        labels = int((of["labels"][:, part][:, shifts:] != -100).sum())
        if labels:
            losses.append(outputs.loss * labels)
        logits.append(outputs.logits)
        count += labels
    return sum(losses) / count, torch.cat(logits, 1)


def unmodified(model, of):
    """Return loss, logits and gradients of the unmodified model."""
    model = copy.deepcopy(model)
    loss, logits = alone(model, of)
    loss.backward()
    return loss.detach(), logits.detach(), gradients(model)


def on_rank(comm, model, of, strategy="ring", layout=None, kind="zigzag", **options):
    """Return loss, logits and gradients of one rank, from a copy of the model that is enabled."""
    model = copy.deepcopy(model)
    sp = huggingface.enable(model, comm, strategy, layout=kind, **options)
    found = step(sp, of, layout)
    sp.disable()
    return found


def step(sp, of, layout=None):
    """Return loss, logits and gradients of one rank, whose model has no gradients yet."""
    outputs = sp.model(**sp.shard(of, layout))
    outputs.loss.backward()
    sp.average_gradients()
    return outputs.loss.detach(), sp.unshard(outputs).logits.detach(), gradients(sp.model)


def assert_same(results, expected, kept, tolerance=2e-5):
    """Assert that each rank has the expected loss, logits of real tokens, and gradients."""
    loss, logits, grads = expected
    for found in results:
        torch.testing.assert_close(found[0], loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found[1][kept], logits[kept], rtol=tolerance, atol=tolerance)
        assert found[2].keys() == grads.keys()
        for name, gradient in grads.items():
            scale = float(gradient.abs().max())
            close = {"rtol": 0, "atol": tolerance * max(scale, 1e-3)}
            torch.testing.assert_close(found[2][name], gradient, **close, msg=name)


def compare(model, of, ranks, *arguments, tolerance=2e-5, **options):
    """Assert that virtual ranks compute what the unmodified model computes."""
    expected = unmodified(model, of)

    def run(comm):
        return on_rank(comm, model, of, *arguments, **options)

    assert_same(virtual(ranks, run), expected, real(of), tolerance)


def compare_all(model, batches, ranks):
    """Assert that virtual ranks compute for each batch what the unmodified model computes.

    The model is enabled once for all batches, which takes less time than `compare` for each batch.
    """

    def run(comm):
        enabled, found = copy.deepcopy(model), []
        sp = huggingface.enable(enabled, comm)
        for of in batches:
            enabled.zero_grad()
            found.append(step(sp, of))
        return found

    for of, *results in zip(batches, *virtual(ranks, run), strict=True):
        assert_same(results, unmodified(model, of), real(of))
