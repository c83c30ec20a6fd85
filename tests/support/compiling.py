"""Contexts in which another thread is compiling."""

import contextlib
import faulthandler
import threading

import torch


class Waits(torch.nn.Module):
    """A module whose forward, which torch.export runs, calls a function."""

    def __init__(self, wait):
        super().__init__()
        self.wait = wait

    def forward(self, x):
        self.wait()
        return x.sin()


def compile_slowly(wait):
    def backend(graph, inputs):
        wait()
        return graph

    # Code that torch has compiled eight times is not compiled again, whatever the backend.
    torch.compile(_new_code(), backend=backend)(torch.ones(1))


def _new_code():
    """Return a function with a new code object."""
    scope = {}
    exec("def sine(x): return x.sin()", scope)
    return scope["sine"]


def export_slowly(wait):
    torch.export.export(Waits(wait), (torch.ones(1),), strict=False)


@contextlib.contextmanager
def compiling_elsewhere(compile=compile_slowly):
    """Within this context, another thread compiles a function."""
    began, end = threading.Event(), threading.Event()

    def wait():
        began.set()
        assert end.wait(60)

    thread = threading.Thread(target=compile, args=(wait,))
    thread.start()
    try:
        if not began.wait(60):  # say where the other thread is
            faulthandler.dump_traceback()
            raise AssertionError(f"the other thread does not compile: alive {thread.is_alive()}")
        yield
    finally:
        end.set()
        thread.join()
