"""Where tests get processes from: a server that imports once what all of them need, and forks."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")


def preload():
    """Set the modules that the server imports first; a benchmark may have set others."""
    PROCESSES.set_forkserver_preload(["tests.support.preloaded"])


preload()
