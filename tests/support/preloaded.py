"""What is slow to import, for the server of processes; what it has imported is never collected."""

import gc
import importlib

SLOW = [
    *("torch._dynamo", "matplotlib.figure", "triton", "zmq.auth.thread"),
    *("seqpar.commands.serve", "seqpar.servers.pool", "seqpar.servers.connecting"),
    *("tests.support.cases", "tests.support.linear_cases"),
]
for name in SLOW:
    importlib.import_module(name)
gc.freeze()
