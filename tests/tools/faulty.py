"""Programs of two calls in which one rank does not do what the other ranks do.

A program is a list of passes: the forwards and backwards of two calls. All ranks run the same list,
except one faulty rank. It skips a pass, repeats a pass, runs the passes in a different order, or
makes one call with a wrong argument. Every rank must then get an error in time or the right result.
"""

import dataclasses
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from seqpar import Layout, PeerError
from tests.support import cases, linear_cases
from tests.support.linear_cases import LinearCase
from tests.support.ranks import Pool

TIMEOUT = 8.0  # seconds, the timeout of the groups of these programs
ORDERS = (  # of forward and backward of calls 0 and 1
    (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)),
    (("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)),
    (("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)),
    (("forward", 1), ("forward", 0), ("backward", 0), ("backward", 1)),
    (("forward", 1), ("forward", 0), ("backward", 1), ("backward", 0)),
)
MALFORMED = {  # what is wrong: changes of a call's arguments
    "no layout": {"layout": None},
    "a layout for more ranks": {"layout": Layout.contiguous(64, 7)},
    "causal is no bool": {"causal": None},
    "q of two dimensions": {"q": torch.zeros(3, 8)},
    "k of another dtype": {"k": torch.zeros(3, 1, 8, dtype=torch.int64)},
    "a scale that is no number": {"softmax_scale": "1", "scale": "1"},
    "an unknown argument": {"windowsize": (1, 1)},
}


class Program(NamedTuple):
    """The passes of all ranks, and the passes of the faulty rank."""

    cases: tuple
    order: tuple
    faulty_rank: int
    fault: str
    faulty_order: tuple
    malformed: str | None = None  # the name of the changes of the faulty rank's first call

    @property
    def check_ranks(self):
        """Whether all ranks compare their calls before each call."""
        return ("check_ranks", True) in getattr(self.cases[0], "module_options", ())

    def of(self, rank):
        """Return the passes of a rank, and the changes of the arguments of its first call."""
        if rank != self.faulty_rank:
            return self.order, {}
        changes = dict(MALFORMED[self.malformed]) if self.malformed else {}
        changes.pop("scale" if hasattr(self.cases[0], "softcap") else "softmax_scale", None)
        return self.faulty_order, changes


def draw_program(random, ranks, case):
    """Draw a program of `case` and of another call like it."""

    def choose(*options):
        return options[random.integers(len(options))]

    if not isinstance(case, LinearCase):
        case = dataclasses.replace(case, module_options=(("check_ranks", choose(True, False)),))
    other = dataclasses.replace(case, seed=case.seed + 1)
    if choose(True, False) and not isinstance(case, LinearCase):
        others = [name for name in cases.STRATEGIES if name != case.strategy.partition("+")[0]]
        other = dataclasses.replace(other, strategy=choose(*others))
    order, rank = choose(*ORDERS), int(random.integers(ranks))
    fault = choose("skip", "repeat", "reorder", "malformed")
    # If two calls differ only in their data, no rank can tell them apart. In such programs, only
    # backwards and the last forward are skipped, repeated or run in a different order.
    alike, forwards = other.strategy == case.strategy, [i for kind, i in order if kind == "forward"]
    step = choose(*(step for step in order if not alike or step != ("forward", forwards[0])))
    if fault == "skip":
        dropped = {step, ("backward", step[1])}
        faulty = tuple(kept for kept in order if kept not in dropped)
    elif fault == "repeat":
        i = order.index(step)
        faulty = (*order[: i + 1], *order[i:])
    elif fault == "reorder":
        faulty = choose(
            *[
                steps
                for steps in ORDERS
                if steps != order
                and (not alike or [i for kind, i in steps if kind == "forward"] == forwards)
            ]
        )
    else:
        return Program((case, other), order, rank, fault, order, choose(*MALFORMED))
    return Program((case, other), order, rank, fault, faulty)


def execute(group, program):
    """Run a program on this rank; return its results, its error and the seconds that it took.

    The results are by call and name. The error is (type, text), or None if no error ended the
    program.
    """
    order, changes = program.of(dist.get_rank(group))
    begun, found, start = {}, {}, time.monotonic()
    try:
        for kind, i in order:
            case = program.cases[i]
            kind_of = linear_cases if isinstance(case, LinearCase) else cases
            if kind == "forward":
                outputs, leaves = kind_of.begin(
                    group, case, **(changes if i == order[0][1] else {})
                )
                begun[i] = outputs, leaves
                found[i] = {name: x.detach() for name, (x, _) in outputs.items()}
            else:
                outputs, leaves = begun[i]
                for leaf in leaves.values():
                    leaf.grad = None
                cases.backward(outputs, retain_graph=True)
                found[i] |= {f"d{name}": leaves[name].grad for name in ("q", "k", "v")}
        error = None
    except (ValueError, TypeError, PeerError) as raised:
        error = type(raised), str(raised)
    arrays = {
        i: {name: x.double().numpy() for name, x in values.items()} for i, values in found.items()
    }
    return arrays, error, time.monotonic() - start


def faults_of(program, ranks):
    """Run a program on new processes; return what is wrong with the ranks' answers or ends."""
    with Pool(ranks, TIMEOUT) as pool:
        try:
            answers = pool.each(ranks, execute, program)
        except (TimeoutError, EOFError) as hang:
            return [f"a rank hung or died: {hang!r}"]
        codes = pool.leave()
    wrong = [f"rank {rank} ended with code {code}" for rank, code in enumerate(codes) if code]
    # All ranks may refuse a call, even without a faulty rank.
    errors = [value[1] for kind, value in answers if kind != "error"]
    refused = all(error and error[0] in (ValueError, TypeError) for error in errors)
    for rank, (kind, value) in enumerate(answers):
        found = value[2] if kind == "error" else wrong_with(program, rank, value, refused)
        wrong += [found] if found else []
    return wrong


def wrong_with(program, rank, answer, refused):
    """Return what is wrong with a rank's answer, or None.

    An answer is right if it came in time, its results are right, and its error, if any, is one that
    this rank may get. `refused` says that all ranks refused an argument.
    """
    arrays, error, seconds = answer
    if seconds > 3 * TIMEOUT:
        return f"rank {rank} took {seconds:.1f} s"
    innocent = rank != program.faulty_rank and not (program.check_ranks or refused)
    if error is not None and innocent and not issubclass(error[0], PeerError):
        return f"rank {rank} got {error}"
    if error is None and rank == program.faulty_rank and program.malformed:
        return f"rank {rank} got no error, though it was called with {program.malformed}"
    for i, values in arrays.items():
        case = program.cases[i]
        expected = expected_on(case, rank)
        for name, x in values.items():
            if not close(x, expected[name], case.dtype):
                return f"rank {rank}: {name} of call {i} is wrong"
    return None


def expected_on(case, rank):
    """Return the oracle's results for a rank's tokens, by name."""
    token_dim = 0 if case.batch is None else 1
    rows = case.layout.token_indices(rank).numpy()
    if isinstance(case, LinearCase):
        packed = linear_cases.oracle(case)
        return {
            name: x if name in ("state", "dinitial") else np.take(x, rows, token_dim)
            for name, x in packed.items()
        }
    kv_rows = (case.kv_layout or case.layout).token_indices(rank).numpy()
    packed = dict(zip(cases.NAMES, cases.oracle(case), strict=False))
    return {
        name: np.take(x, kv_rows if name in ("dk", "dv") else rows, token_dim)
        for name, x in packed.items()
        if name != "dsinks"
    }


def close(x, y, dtype, roundings=64):
    """Whether results are right up to rounding. Results of wrong memory differ by far more."""
    finite = np.isfinite(y)
    if not np.array_equal(np.isfinite(x), finite):
        return False
    bound = 1e-9 if dtype == torch.float64 else roundings * torch.finfo(dtype).eps
    return cases.largest(x[finite] - y[finite]) <= bound * max(1.0, cases.largest(y[finite]))
