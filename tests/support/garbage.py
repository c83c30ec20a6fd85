"""Find the objects that a function leaves to the garbage collector."""

import gc


def left_by(function, *arguments):
    """Return the objects of a call that only the garbage collector would free."""
    function(*arguments)  # imports modules and fills caches
    gc.collect()
    gc.freeze()  # the collector ignores objects that exist now
    gc.disable()
    try:
        function(*arguments)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
