"""Random calls whose results must have the same bits on any number of ranks, in any layout."""

import contextlib
import itertools
import random
import threading

import numpy as np
import torch

from seqpar import Layout
from tests.support.cases import Case, backward, begin
from tests.support.mask_cases import disjoint_ranges

STRATEGIES = "ring", "all_gather", "ulysses", "usp", "usp+all_gather"
RANKS = {"module_options": (("deterministic", "ranks"),)}


def bits(comm, case):
    """Return out, lse, dq, dk and dv of the whole pack, as bytes."""
    dim, kv_layout = 0 if case.batch is None else 1, case.kv_layout or case.layout
    outputs, leaves = begin(comm, case)
    backward(outputs)
    found = [case.layout.unshard(x.detach(), comm, dim) for x, _ in outputs.values()]
    found.append(case.layout.unshard(leaves["q"].grad, comm, dim))
    found += [kv_layout.unshard(leaves[name].grad, comm, dim) for name in "kv"]
    return [x.contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in found]


@contextlib.contextmanager
def torch_threads(count):
    """Within this context, this thread and the threads that it starts use this many torch
    threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def default_threads():
    """Return the number of torch threads that a new thread uses."""
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return counts[0]


def drawn_layout(drawn, cu, ranks):
    """Draw a layout of any kind, including one in which some ranks hold no tokens."""
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
    """Draw a call; return it as Ring on one rank, and in three different ways."""
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


def threaded_cases(seed):
    """Draw a call of short head dims and few heads; return it as Ring on one rank, and in all ways.

    Tiles with only one query, and tiles whose keys do not begin at a cache line, are frequent.
    """
    drawn = random.Random(1000 + seed)
    lengths = [drawn.choice([1, 15, 33, 64, 65, 129, 200]) for _ in range(drawn.randint(1, 3))]
    cu = [0, *np.cumsum(lengths).tolist()]
    kv_heads = drawn.choice([1, 2, 2, 3, 4])
    dim = drawn.choice([1, 2, 3, 17, 63, 64, 96])
    arguments = {
        "causal": drawn.random() < 0.6,
        "heads": kv_heads * drawn.choice([1, 1, 2, 3]),
        "kv_heads": kv_heads,
        "dim": dim,
        "value_dim": drawn.choice([dim, dim, 1, 40]),
        "batch": drawn.choice([None, None, 2]),
        "dtype": drawn.choice([torch.float32, torch.bfloat16, torch.float64, torch.float16]),
        "backend": drawn.choice(["aten", "aten", "reference"]),
        "sinks": drawn.random() < 0.3,
        "dlse": drawn.random() < 0.3,
        "softcap": drawn.choice([0.0, 3.0]),
        "alibi": drawn.choice(["", "heads"]),
        "window": drawn.choice([(-1, -1), (-1, -1), (40, 0), (7, 9)]),
        "seed": seed,
    }
    made = lambda strategy, ranks: Case(  # noqa: E731
        strategy, drawn_layout(drawn, cu, ranks), **arguments, **RANKS
    )
    return made("ring", 1), [made(strategy, drawn.randint(2, 4)) for strategy in STRATEGIES]
