"""Count how often kernels would be compiled over random packs, without a GPU.

`python -m tests.tools.compilations sm_90` prints JSON: for the architecture and each kernel, the
number of different keys by which Triton caches compilations of its launches. Run it without
TRITON_INTERPRET.
"""

import json
import sys
from collections import defaultdict

import numpy as np
import torch
from seqpar.kernels.flash_attention import configs, launching
from seqpar.kernels.lightning_attention import configs as lightning_configs
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from seqpar import Layout
from seqpar.layout.masks.mask import Blocks, Mask, slices_between
from seqpar.linear.inputs import Inputs
from seqpar.linear.routes import SpanStates
from seqpar.linear.states.backends import triton as linear
from seqpar.linear.states.state_options import StateOptions
from seqpar.softmax.backends import triton as softmax
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.compute.partial import OutputGradient, PartialGradients
from tests.tools.aot import TARGETS

RANKS, HEADS, DIM = 2, 8, 64


def key(launch, tensors, backend, binders):
    """Return the key by which Triton's JIT caches the compilation that a launch needs."""
    kernel = launch.kernel
    if kernel not in binders:
        binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
    _, specialised, options = binders[kernel](*tensors, *launch.arguments, **launch.flags)
    return str(specialised), str(options)


def softmax_calls(cu_seqlens, batch):
    """Compute the first hops of a ring on some ranks, forward and backward."""
    geometry = Layout.zigzag(cu_seqlens, RANKS).geometry
    mask = Mask.of(True, (-1, -1), None, geometry)
    tables = [slices_between(geometry, 0, geometry, rank, mask) for rank in range(RANKS)]
    options = CallOptions(0.1, 0.0, "triton", True)

    def rows(n):
        return torch.empty(batch, n, HEADS, DIM, dtype=torch.bfloat16)

    q = rows(tables[0].query_rows)
    blocks = [(x, x) for x in (rows(table.key_rows) for table in tables)]
    out, lse = softmax.forward_blocks(q, blocks, Blocks(tuple(tables)), options, None)
    output = OutputGradient(q, out, lse, None)
    for table, (k, v) in zip(tables, blocks, strict=True):
        gradients = PartialGradients.of(*(torch.empty(x.shape) for x in (q, k, v)))
        softmax.backward(output, q, k, v, table, gradients, options)


def linear_calls(cu_seqlens, batch):
    """Compute linear attention of the documents, forward and backward, as parts between other
    ranks."""
    edges = np.asarray(cu_seqlens)
    entering = np.arange(edges.size - 1)
    spans = SpanStates(edges, entering, entering)
    x = torch.empty(batch, int(edges[-1]), HEADS, DIM, dtype=torch.bfloat16)
    states = torch.empty(entering.size, batch, HEADS, DIM, DIM)
    options = StateOptions(0.1, True, "triton", None)
    linear.Forward(Inputs(x, x, x), spans, options).finish(states)
    linear.Backward(Inputs(x, x, x), x, spans, options, states).finish(states)


def main():
    recorded = []
    launching._run = lambda launch, tensors: recorded.append((launch, tensors))
    counts = {}
    generator = np.random.default_rng(0)
    packs = [
        np.r_[0, np.cumsum(generator.integers(1, 700, generator.integers(1, 6)))].tolist()
        for _ in range(60)
    ]
    for architecture in sys.argv[1:] or TARGETS:
        for module in (configs, lightning_configs):
            module.architecture = lambda device, name=architecture: name
            module._chosen.cache_clear()
        backend, binders, found = make_backend(TARGETS[architecture]), {}, defaultdict(set)
        for i, pack in enumerate(packs):
            for call in (softmax_calls, linear_calls):
                recorded.clear()
                call(pack, 1 + i % 2)
                for launch, tensors in recorded:
                    found[launch.kernel.__name__].add(key(launch, tensors, backend, binders))
        counts[architecture] = {name: len(keys) for name, keys in sorted(found.items())}
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
