"""Decoding on attention servers: a program of steps, with an event between two steps."""

import contextlib

import torch

import seqpar
from tests.support.servers import connect

LAYERS = ("first", 1)
STEPS = (
    1,
    3,
    1,
    2,
    1,
    4,
    1,
    1,
)  # tokens that each step adds; `DROPPED` says which are removed again
DROPPED = {3: 1, 5: 3}  # step: how many tokens are removed after it
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
    """Return q, k and v of each layer, (batch, tokens, heads, dim), with 4 query and 2 KV heads."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(4, 8), (2, 8), (2, 6)] * len(LAYERS)
    x = [torch.randn(*batch, tokens, *size, generator=generator).to(dtype) for size in sizes]
    return {layer: x[3 * i : 3 * i + 3] for i, layer in enumerate(LAYERS)}


def part(tensors, start, stop):
    return [x[..., start:stop, :, :] for x in tensors]


def prefilled(pool, tensors, length=PREFILL, **options):
    """Make a cache that holds the keys and values of a prefill."""
    cache = seqpar.ServerCache(pool, length, **options)
    for layer, x in tensors.items():
        cache.put(layer, *part(x, 0, length)[1:])
    return cache


def decode(cache, tensors, between=lambda i: None, **options):
    """Return (out, lse) of all layers of all steps; call `between(i)` before step i."""
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
    """Yield a pool without servers: the process of the pool computes everything itself."""
    deadlines = {"connect": 0.05}
    with connect(f"ipc://{tmp_path}/nobody", deadlines=deadlines, **options) as pool:
        yield pool


def undisturbed(tmp_path, tensors, segment=None, **options):
    """Return what `decode` returns if the process of the pool computes everything itself."""
    with nobody(tmp_path) as pool, prefilled(pool, tensors, segment=segment) as cache:
        return decode(cache, tensors, **options)


def same_bits(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
