"""Stop long work between two steps when the user presses Ctrl-C."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_log = logging.getLogger("seqpar")


@contextmanager
def stop_on_interrupt(work: str) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether the user has interrupted `work` in this context.

    The first Ctrl-C only logs a line, so the current step of the work can end. A second one raises
    a KeyboardInterrupt. Outside the main thread, and if the program handles SIGINT itself, nothing
    changes and the function returns False.
    """
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _log.warning("%s stops after the current step; Ctrl-C again stops it immediately", work)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
