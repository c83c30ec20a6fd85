"""Imports modules that are slow to import, in the server that forks processes.

The garbage collector never looks at these modules.
"""

import contextlib
import gc
import importlib
import os

# pyarrow, which transformers' trainer imports, starts a thread. Forks of a process with threads may
# hang: they never get a lock that a thread holds at that moment.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

SLOW = [
    *("torch._dynamo", "torch._functorch.aot_autograd", "transformers.trainer"),
    *("matplotlib.figure", "triton", "grpc.aio"),
    *("seqpar.commands.serve", "seqpar.servers.pool.pool", "seqpar.servers.pool.dispatcher"),
    *("tests.support.cases", "tests.support.linear_cases", "tests.support.interpreter"),
]
for name in SLOW:
    with contextlib.suppress(ImportError):  # its extra is not installed
        importlib.import_module(name)
gc.freeze()
