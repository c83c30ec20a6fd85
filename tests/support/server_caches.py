"""Decoding on attention servers: programs of steps, with something that happens between them."""

import contextlib

import torch

import seqpar
from tests.support.servers import connect

LAYERS = ("first", 1)
STEPS = (1, 3, 1, 2, 1, 4, 1, 1)  # tokens of each, of which some are dropped again
DROPPED = {3: 1, 5: 3}  # after a step: how many
PREFILL = 21
TOKENS = PREFILL + sum(STEPS)
OPTIONS = {
    "plain": {},
    "window": {"window_size": (6, 0)},
    "sinks and softcap": {"sinks": torch.linspace(-1, 1, 4), "softcap": 2.0, "softmax_scale": 0.4},
    "full": {"causal": False, "window_size": (20, 1)},
}
QUICK = {"connect": 0.3, "request": 0.7, "hedge": 6.0, "give_up": 8.0}


def drawn(tokens=TOKENS, batch=(2,), dtype=torch.float32, seed=0):
    """q, k and v of each layer, with GQA: (batch, tokens, heads, dim)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(4, 8), (2, 8), (2, 6)] * len(LAYERS)
    x = [torch.randn(*batch, tokens, *size, generator=generator).to(dtype) for size in sizes]
    return {layer: x[3 * i : 3 * i + 3] for i, layer in enumerate(LAYERS)}


def part(tensors, start, stop):
    """Some tokens of q, k and v."""
    return [x[..., start:stop, :, :] for x in tensors]


def prefilled(pool, tensors, length=PREFILL, **options):
    """A cache of a prefill."""
    cache = seqpar.ServerCache(pool, length, **options)
    for layer, x in tensors.items():
        cache.put(layer, *part(x, 0, length)[1:])
    return cache


def decode(cache, tensors, between=lambda i: None, **options):
    """The (out, lse) of all layers of all steps, with what happens before step i."""
    found = []
    for i, tokens in enumerate(STEPS):
        between(i)
        start = cache.length
        cache.extend(tokens)
        for layer, x in tensors.items():
            new = part(x, start, start + tokens)
            found += cache.attend(layer, *new, return_lse=True, **options)
        cache.truncate(cache.length - DROPPED.get(i, 0))
    return found


@contextlib.contextmanager
def nobody(tmp_path, **options):
    """A pool without servers: all is computed at home."""
    deadlines = {"connect": 0.05}
    with connect(f"ipc://{tmp_path}/nobody", deadlines=deadlines, **options) as pool:
        yield pool


def undisturbed(tmp_path, tensors, segment=None, **options):
    """What `decode` returns where all is computed at home."""
    with nobody(tmp_path) as pool, prefilled(pool, tensors, segment=segment) as cache:
        return decode(cache, tensors, **options)


def same_bits(found, expected):
    """Whether all results are the same."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
