"""Where tests get processes from: a server that imports once what all of them need, and forks."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.support.preloaded"])
