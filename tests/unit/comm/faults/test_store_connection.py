"""How many sockets the connections to a store take, and that they notice its end."""

import gc
import os
from datetime import timedelta

import torch.distributed as dist

from seqpar.comm.faults.store_connection import Connection
from tests.support.servers import wait_until


def keep_store(port=0):
    return dist.TCPStore("127.0.0.1", port, 1, True, timeout=timedelta(seconds=20))


def sockets():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def opened(count, store):
    """How many sockets so many more connections take, at both ends, and the connections."""
    before, connections = sockets(), [Connection(store) for _ in range(count)]
    for connection in connections:
        connection.set("key", "value")  # the store has accepted it
    return sockets() - before, connections


def test_connections_of_a_process_share_one_socket():
    store = keep_store()
    before = sockets()
    first, connections = opened(1, store)
    more, others = opened(4, store)
    assert (first, more) == (4, 8)
    del connections, others
    wait_until(lambda: sockets() == before)  # the store's thread closes its ends later
    assert opened(1, store)[0] == 4
