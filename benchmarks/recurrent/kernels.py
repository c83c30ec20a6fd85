"""Compare the recurrent primitive on one core with the plain recurrence and fla's naive form.

    python -m benchmarks.recurrent.kernels

The plain recurrence and fla's take tokens one by one, and autograd differentiates both. Results are
first compared with the recurrence in fp64; then rounds interleave all contenders. Times are CPU
times of the process. fla's form is measured only if fla-core is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.harness import worst_error
from seqpar.costs.profile.machine import core_seconds
from seqpar.linear.attend import begin_backward, begin_forward
from seqpar.linear.decode import decode_step
from seqpar.linear.inputs import Inputs
from seqpar.linear.kinds import KINDS, kind
from seqpar.linear.maps.map_options import MapOptions
from seqpar.linear.routes import SpanStates

LIMIT = 1e-5  # RMS error in fp32, over the RMS of the expected result
Call = Callable[[], list[Tensor]]  # returns out, and after a backward the inputs' gradients
# fla's module and function, and the names of our inputs in its order.
NAIVE = {
    "scalar_decay": ("simple_gla", "naive_recurrent_simple_gla", "q k v log_decay"),
    "vector_decay": ("gla", "naive_recurrent_gla", "q k v log_decay"),
    "gated_delta": ("gated_delta_rule", "naive_recurrent_gated_delta_rule", "q k v beta log_decay"),
    "kda": ("kda", "naive_recurrent_kda", "q k v log_decay beta"),
}


def inputs_of(name: str, tokens: int, heads: int, dim: int) -> tuple[Inputs, Tensor]:
    """Return random inputs of one document, with keys of length 1, and dout."""
    this, generator = kind(name), torch.Generator().manual_seed(0)

    def draw(*shape: int, of: Callable[..., Tensor] = torch.rand) -> Tensor:
        return of(1, tokens, heads, *shape, generator=generator)

    q, k, v, dout = (draw(dim, of=torch.randn) for _ in range(4))
    shapes = {"head": (), "key": (dim,)}
    log_decay = -0.1 * draw(*shapes[this.decay]) if this.decay in shapes else None
    if this.decay == "constant":
        log_decay = -torch.logspace(-9, -3, heads, base=2)
    beta = draw() if this.uses_beta else None
    return Inputs(q, torch.nn.functional.normalize(k, dim=-1), v, log_decay, beta), dout


def ours(name: str, inputs: Inputs, dout: Tensor, backward: bool) -> Call:
    none = np.array([-1])
    spans = SpanStates(np.array([0, inputs.q.shape[1]]), none, none)
    options = MapOptions(kind(name), inputs.q.shape[3] ** -0.5, "aten")

    def call() -> list[Tensor]:
        out = begin_forward(inputs, spans, options).finish(None)
        if not backward:
            return [out]
        found = begin_backward(inputs, dout, spans, options, None).finish(None)
        return [out, *(x for x in found if x is not None)]

    return call


def differentiated(
    function: Callable[[Inputs], Tensor], inputs: Inputs, dout: Tensor, backward: bool
) -> Call:
    """Return a call of a function that autograd differentiates."""

    def call() -> list[Tensor]:
        leaves = [None if x is None else x.detach().requires_grad_(backward) for x in inputs]
        out = function(Inputs(*leaves))  # type: ignore[arg-type]
        if not backward:
            return [out]
        wanted = [x for x in leaves if x is not None]
        return [out.detach(), *torch.autograd.grad(out, wanted, dout)]

    return call


def plain(name: str, inputs: Inputs) -> Tensor:
    """Return out of the recurrence, token by token."""
    dtype = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
    state = torch.zeros(inputs.state_shape, dtype=dtype)
    return decode_step(name, inputs, state, scale=inputs.q.shape[3] ** -0.5)[0]


def naive(name: str, inputs: Inputs) -> Tensor:
    """Return out of fla's naive recurrence, which scales q by K^−½."""
    module, function, order = NAIVE[name]
    found = getattr(importlib.import_module(f"fla.ops.{module}.naive"), function)
    operands = [getattr(inputs, each) for each in order.split()]
    return found(*operands)[0]


def measured(name: str, shape: tuple[int, int, int], backward: bool, rounds: int) -> dict[str, Any]:
    """Return a row of results: raw seconds and errors of each contender, ratios to ours."""
    inputs, dout = inputs_of(name, *shape)
    exact = Inputs(*(None if x is None else x.double() for x in inputs))  # type: ignore[arg-type]
    contenders = {
        "seqpar, aten": ours(name, inputs, dout, backward),
        "plain": differentiated(lambda x: plain(name, x), inputs, dout, backward),
    }
    if name in NAIVE and importlib.util.find_spec("fla") is not None:
        form = differentiated(lambda x: naive(name, x), inputs, dout, backward)
        contenders["fla, naive"] = form
    expected = differentiated(lambda x: plain(name, x), exact, dout.double(), backward)()
    errors = {label: worst_error(call(), expected) for label, call in contenders.items()}
    del expected
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for _ in range(rounds):
        for label, call in contenders.items():
            seconds[label].append(core_seconds(call, "cpu"))
    own = np.array(seconds["seqpar, aten"])
    ratios = {
        label: statistics.median((np.array(each) / own).tolist())
        for label, each in seconds.items()
        if label != "seqpar, aten"
    }
    tokens, heads, dim = shape
    row = {"kind": name, "tokens": tokens, "heads": heads, "dim": dim, "backward": backward}
    return row | {"seconds": seconds, "errors": errors, "times ours": ratios}


def measure(options: Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    shape, rows = (options.tokens, options.heads, options.dim), []
    for name in options.kinds:
        for backward in (False, True):
            row = measured(name, shape, backward, options.rounds)
            rows.append(row)
            milliseconds = 1e3 * statistics.median(row["seconds"]["seqpar, aten"])
            both = "forward and backward" if backward else "forward"
            peers = ", ".join(f"{label} {x:.1f} times" for label, x in row["times ours"].items())
            print(f"{name:15} {both:21} {milliseconds:7.1f} ms; {peers}", flush=True)
    return {"limit": LIMIT, "rows": rows}


ARGUMENTS = {
    "--tokens": 4096,
    "--heads": 4,
    "--dim": 64,
    "--kinds": ([*KINDS], None, [*KINDS]),
    "--rounds": 5,
}

if __name__ == "__main__":
    found = harness.run("recurrent-kernels", __doc__, ARGUMENTS, measure)
    if wrong := [x["kind"] for x in found["rows"] if x["errors"]["seqpar, aten"] > LIMIT]:
        sys.exit(f"wrong: {wrong}")
