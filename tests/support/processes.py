"""A server that imports once what all test processes need, and then forks the processes."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")


def preload():
    """Set the modules that the server imports first, since a benchmark may have set other ones."""
    PROCESSES.set_forkserver_preload(["tests.support.preloaded"])


preload()
