"""What is read of a layer's code."""

import concurrent.futures
import gc
import inspect
import time

import transformers

from seqpar.integrations.huggingface.model import code


def test_threads_may_read_code_simultaneously():
    """CPython 3.11 raises a SystemError if threads change while one makes a syntax tree."""
    forward, threshold = inspect.unwrap(transformers.LlamaModel.forward), gc.get_threshold()

    def change_threads(phase, info):
        time.sleep(0)

    gc.callbacks.append(change_threads)
    gc.set_threshold(20)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            results = list(threads.map(len, threads.map(code._syntax, [forward] * 50)))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(change_threads)
    assert len(set(results)) == 1
