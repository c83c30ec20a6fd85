"""Random calls whose bits must be the same on any number of ranks, in any layout."""

import itertools
import random

import numpy as np
import torch

from seqpar import Layout
from tests.support.cases import Case, backward, begin
from tests.support.mask_cases import disjoint_ranges

STRATEGIES = "ring", "all_gather", "ulysses", "usp", "usp+all_gather"
RANKS = {"module_options": (("deterministic", "ranks"),)}


def bits(comm, case):
    """Out, lse, dq, dk and dv of the whole pack, as bytes."""
    dim, kv_layout = 0 if case.batch is None else 1, case.kv_layout or case.layout
    outputs, leaves = begin(comm, case)
    backward(outputs)
    found = [case.layout.unshard(x.detach(), comm, dim) for x, _ in outputs.values()]
    found.append(case.layout.unshard(leaves["q"].grad, comm, dim))
    found += [kv_layout.unshard(leaves[name].grad, comm, dim) for name in "kv"]
    return [x.contiguous().view(torch.uint8).numpy().tobytes() for x in found]


def drawn_layout(drawn, cu, ranks):
    """Draw a layout of any kind, also one that gives some ranks nothing."""
    kind = drawn.choice(["contiguous", "zigzag", "striped", "spans"])
    if kind == "striped":
        return Layout.striped(cu, ranks, stripe=drawn.randint(1, 40))
    if kind != "spans":
        return getattr(Layout, kind)(cu, ranks)
    spans = [[] for _ in range(ranks)]
    for document, length in enumerate(np.diff(cu).tolist()):
        cuts = sorted({0, length, *(drawn.randint(0, length) for _ in range(4))})
        for start, stop in itertools.pairwise(cuts):
            spans[drawn.randrange(ranks)].append((document, start, stop))
    return Layout.from_spans(spans, cu)


def drawn_cases(seed):
    """Draw a call; return it on one rank by ring, and in three other ways."""
    drawn = random.Random(seed)
    lengths = [drawn.randint(0, 90) for _ in range(drawn.randint(1, 3))]
    cu = [0, *np.cumsum(lengths).tolist()]
    kv_cu = cu
    if drawn.random() < 0.25:
        kv_cu = [0, *np.cumsum([drawn.randint(0, 90) for _ in lengths]).tolist()]
    kv_lengths = np.diff(kv_cu).tolist()
    kv_heads = drawn.choice([1, 2, 3])
    dim = drawn.choice([5, 8, 16])
    arguments = {
        "causal": drawn.random() < 0.6,
        "heads": kv_heads * drawn.choice([1, 2]),
        "kv_heads": kv_heads,
        "dim": dim,
        "value_dim": drawn.choice([dim, 8]),
        "batch": drawn.choice([None, None, 2]),
        "dtype": drawn.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16]),
        "backend": drawn.choice(["aten", "aten", "reference"]),
        "sinks": drawn.random() < 0.3,
        "dlse": drawn.random() < 0.3,
        "softcap": drawn.choice([0.0, 0.0, 3.0]),
        "alibi": drawn.choice(["", "", "heads"]),
        "scale": drawn.choice([None, None, -0.5]),
        "seed": seed,
    }
    kind = drawn.choice(["none", "none", "window", "prefix", "ranges"])
    if kind == "window":
        arguments["window"] = drawn.randint(0, 40), drawn.choice([-1, 0, 9])
    elif kind == "prefix":
        arguments["prefix"] = tuple(drawn.randint(0, n) for n in kv_lengths)
    elif kind == "ranges":
        arguments["ranges"] = tuple(map(tuple, disjoint_ranges(seed, cu, kv_cu)))

    def made(strategy, ranks):
        kv_layout = None if kv_cu is cu else drawn_layout(drawn, kv_cu, ranks)
        layout = drawn_layout(drawn, cu, ranks)
        return Case(strategy, layout, kv_layout=kv_layout, **arguments, **RANKS)

    return made("ring", 1), [made(drawn.choice(STRATEGIES), ranks) for ranks in (2, 3, 4)]
