"""Call every strategy at random on 2 to 4 gloo ranks, and compare with fp64 oracles.

Run it as `python -m tests.tools.fuzz`.

One call in five is of linear attention. One call in ten is followed by a second call, and one rank
skips, repeats or reorders passes, or makes a malformed call (`tests.tools.faulty`). Call i of a
seed is always the same, so `--only i` repeats it alone.

The command exits with 1 if a call gives a wrong result without an error, if only some ranks refuse
a call, or if a rank hangs or aborts. Calls that all ranks refuse with a ValueError are counted
separately.
"""

import argparse
import collections
import dataclasses
import itertools
import sys
import time

import numpy as np
import torch

from seqpar import Layout
from tests.support import cases, linear_cases
from tests.support.cases import STRATEGIES, VARIANTS, Case
from tests.support.linear_cases import LinearCase
from tests.support.mask_cases import disjoint_ranges
from tests.support.ranks import Pool
from tests.tools.faulty import draw_program, faults_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def draw(seed, i):
    """Return (ranks, case) of call i.

    In one call of fifty, a prefix is longer than its document, and the call must be refused.
    """
    random = np.random.default_rng((seed, i))

    def choose(*options):
        return options[random.integers(len(options))]

    def lengths(count, longest):
        return random.integers(0, longest // count + 1, count)

    def layout(cu):
        kind = choose("contiguous", "zigzag", "striped", "spans", "short", "default stripes")
        if kind == "short":
            return Layout.zigzag(cu, ranks, min_chunk=choose(1, 3, 16))
        if kind == "default stripes":
            return Layout.striped(cu, ranks)
        if kind == "striped":
            return Layout.striped(cu, ranks, stripe=choose(1, 3, 7, 64))
        if kind != "spans":
            return getattr(Layout, kind)(cu, ranks)
        spans = [[] for _ in range(ranks)]
        for document, length in enumerate(np.diff(cu)):
            cuts = np.unique([0, length, *random.integers(0, length + 1, choose(0, 2, 5))])
            for start, stop in itertools.pairwise(cuts):
                spans[random.integers(ranks)].append((document, start, stop))
        return Layout.from_spans(spans, cu)

    ranks, documents, longest = choose(2, 3, 4), choose(1, 2, 3, 6), choose(12, 40, 40, 160, 600)
    cu = np.r_[0, np.cumsum(lengths(documents, longest))]
    kv_cu = choose(None, None, np.r_[0, np.cumsum(lengths(documents, longest))])
    keys = np.diff(cu if kv_cu is None else kv_cu)
    prefix = choose(None, None, tuple(int(random.integers(n + 1)) for n in keys))
    kv_heads, dim = choose(1, 2, 3), choose(1, 5, 8, 16, 64)
    # In dq and dk, terms of size scale·√Dv cancel. The bound in short dtypes allows for 4.
    value_dim = choose(3, 8, 16) if dim == 1 else choose(3, 8, 16, 64)
    longer = random.random() < 0.02
    case = Case(
        strategy=choose(*STRATEGIES, *VARIANTS),
        layout=layout(cu),
        kv_layout=None if kv_cu is None else layout(kv_cu),
        causal=choose(True, False),
        window=choose((-1, -1), (-1, -1), (5, 0), (3, 7), (0, 0), (-1, 2), (30, -1), (100, 40)),
        prefix=tuple(int(n) + 1 for n in keys) if longer else prefix,
        scale=choose(None, 0.3, -0.5, 0.0),
        softcap=choose(0.0, 0.0, 2.0),
        alibi=choose("", "", "heads"),
        sinks=choose(True, False),
        dlse=choose(True, False),
        batch=choose(None, None, 1, 2),
        heads=kv_heads * choose(1, 2, 4),
        kv_heads=kv_heads,
        dim=dim,
        value_dim=value_dim,
        dtype=choose(*DTYPES),
        backend=choose("aten", "aten", "reference"),
        seed=i,
    )
    if not longer and random.random() < 0.25:
        ranges = disjoint_ranges((seed, i, 3), cu, kv_cu, tries=choose(3, 12))
        case = dataclasses.replace(case, ranges=ranges)
    return ranks, case


def draw_linear(seed, i):
    """Return (ranks, case) of call i of linear attention, with layout and shapes of `draw`."""
    random, (ranks, like) = np.random.default_rng((seed, i, 1)), draw(seed, i)

    def choose(*options):
        return options[random.integers(len(options))]

    shared = (
        "layout",
        "causal",
        "batch",
        "heads",
        "kv_heads",
        "dim",
        "value_dim",
        "dtype",
        "backend",
        "seed",
    )
    case = LinearCase(
        **{name: getattr(like, name) for name in shared},
        decay=choose(None, 0.0, 0.01, 0.1, 3.0) if like.causal else None,
        scale=choose(1.0, 0.3),
        begun=choose(True, False),
        returned=choose(True, False),
        transport=choose("all_gather", "scan"),
        blocks=choose(1, 2, 5),
        chunk=choose(1, 8, 128),
    )
    return ranks, case


def attempt(pool, ranks, case, call=None):
    """Make a call; return ("right", largest error over its bound), ("refused", why) or ("wrong",
    what)."""
    kind_of = linear_cases if isinstance(case, LinearCase) else cases
    try:
        answers = pool.each(ranks, call or kind_of.run, case)
    except TimeoutError as hang:
        return "wrong", str(hang)
    refusals = [value[1] for kind, value in answers if kind == "error" and value[0] is ValueError]
    if len(refusals) == ranks:
        return "refused", refusals[0]
    if any(kind == "error" for kind, _ in answers):
        pool.restart()  # ranks without an error may still wait for the others
        return "wrong", "\n".join(
            value[2] if kind == "error" else "no error" for kind, value in answers
        )
    if (
        case.prefix is not None
        and (case.prefix > np.diff((case.kv_layout or case.layout).cu_seqlens)).any()
    ):
        return "wrong", "not refused: prefix_lens exceeds the document"
    expected = kind_of.oracle(case)
    found = [kind_of.errors(value, expected, case.dtype) for _, value in answers]
    worst = max(max(each.values()) for each in found)
    return (
        ("right", worst)
        if worst <= 1
        else ("wrong", f"errors over their bounds, rank by rank: {found}")
    )


def fuzz(pool, seed, calls, call=None, say=print, faults=True):
    """Make these calls; return how many went wrong.

    The function reports its progress, and at the end the kinds of calls and the largest errors. In
    one call of ten, a rank is faulty, unless `faults` is False.
    """
    counts, worst, said = collections.defaultdict(collections.Counter), {}, time.monotonic()
    for done, i in enumerate(calls, 1):
        ranks, case = (draw_linear if i % 5 == 4 else draw)(seed, i)
        row = case.strategy, str(case.dtype).removeprefix("torch.")
        if faults and i % 10 == (i // 10 + 7) % 10:
            program = draw_program(np.random.default_rng((seed, i, 2)), ranks, case)
            wrong = faults_of(program, ranks)
            kind, value = ("wrong", f"{program}\n" + "\n".join(wrong)) if wrong else ("faulty", 0.0)
        else:
            kind, value = attempt(pool, ranks, case, call)
        counts[row][kind] += 1
        if kind == "right":
            worst[row] = max(worst.get(row, (0.0, i)), (value, i))
        elif kind == "wrong":
            say(f"call {i} of seed {seed} is WRONG on {ranks} ranks: {case}\n{value}")
        if time.monotonic() - said > 15:
            said = time.monotonic()
            wrong = sum(row["wrong"] for row in counts.values())
            say(f"{done} of {len(calls)} calls, {wrong} wrong")
    kinds = ("right", "refused", "faulty", "wrong")
    head = f"{'strategy':14} {'dtype':9} " + " ".join(f"{kind:>8}" for kind in kinds)
    say(f"{head}  worst error over its bound (and its call)")
    for row in sorted(counts):
        most = "{:.2g} ({})".format(*worst[row]) if row in worst else ""
        numbers = " ".join(f"{counts[row][kind]:8}" for kind in kinds)
        say(f"{row[0]:14} {row[1]:9} {numbers}  {most}")
    return sum(row["wrong"] for row in counts.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="I", help="make just this call")
    parser.add_argument("--faults", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Pool(4) as pool:
        calls = range(options.calls) if options.only is None else [options.only]
        wrong = fuzz(pool, options.seed, calls, faults=options.faults)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
