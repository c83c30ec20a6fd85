"""The processes that tests fork (`tests/support/processes.py`)."""

import os
import sys

import benchmarks.servers.processes  # noqa: F401  # it has its own list of what to import first
from tests.support.processes import PROCESSES


def imported(connection, names):
    connection.send([name in sys.modules for name in names])


def test_a_process_need_not_import_what_is_slow():
    here, there = PROCESSES.Pipe()
    names = ("tests.support.preloaded", "torch._dynamo")
    process = PROCESSES.Process(target=imported, args=(there, names))
    process.start()
    there.close()
    assert here.recv() == [True, True]
    process.join()


def threads_of_parent(connection):
    connection.send(len(os.listdir(f"/proc/{os.getppid()}/task")))


def test_the_server_that_forks_has_one_thread():
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=threads_of_parent, args=(there,))
    process.start()
    there.close()
    assert here.recv() == 1
    process.join()
