import gc
import os
import threading
import time

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported

import tests.support.interpreter  # noqa: F401
from tests.support import processes
from tests.support.ranks import Pool
from tests.support.tiers import pytest_collection_modifyitems, register_profiles

__all__ = ["pytest_collection_modifyitems"]
register_profiles()
torch.set_num_threads(1)


def pytest_collection_finish():
    """Hide imported and collected objects from the garbage collector: all of them stay.

    A full collection took 0.3 s with them, 50 of 500 s of CPU time in all, and takes milliseconds
    without. The server of processes, from which all others are forked, does the same. It starts
    later, with the list of imports that is set here, after all test files were imported.
    """
    processes.preload()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool():
    """Four gloo processes that stay.

    `pool(ranks, function, *arguments)` runs function(group, *arguments) on the first `ranks`.
    """
    with Pool(4) as ranks:
        yield ranks


@pytest.fixture(scope="module", autouse=True)
def threads_end():
    """Wait until the threads of a file's servers and pools have ended.

    One that still computes would be recorded and counted by the next file's tests. The event loop
    of gRPC's calls stays.
    """
    yield
    end = time.monotonic() + 60
    kept = {"seqpar-grpc"}
    while left := {x.name for x in threading.enumerate() if x.name.startswith("seqpar-")} - kept:
        assert time.monotonic() < end, f"threads that nobody ended: {left}"
        time.sleep(0.01)


@pytest.fixture(scope="module", autouse=True)
def garbage_is_collected_once():
    """Hide what a file leaves, imported modules above all, from the garbage collector too.

    Otherwise a collection takes longer from file to file, and some tests ask for many.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def imports_are_those_of_tests():
    """Set again what the server of processes imports: an imported benchmark may have changed it."""
    yield
    processes.preload()
