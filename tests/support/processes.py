"""Where tests get processes from: a server that imports once what all of them need, and forks."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")


def preload():
    """Let the server import what is slow, whatever an imported benchmark has asked of it."""
    PROCESSES.set_forkserver_preload(["tests.support.preloaded"])


preload()
