"""What is slow to import, for the server of processes; what it has imported is never collected."""

import contextlib
import gc
import importlib

SLOW = [
    *("torch._dynamo", "torch._functorch.aot_autograd", "transformers.trainer"),
    *("matplotlib.figure", "triton", "zmq.auth.thread"),
    *("seqpar.commands.serve", "seqpar.servers.pool.pool", "seqpar.servers.pool.dispatcher"),
    *("tests.support.cases", "tests.support.linear_cases", "tests.support.interpreter"),
]
for name in SLOW:
    with contextlib.suppress(ImportError):  # of an extra that is not installed
        importlib.import_module(name)
gc.freeze()
