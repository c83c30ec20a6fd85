"""What a function leaves to the garbage collector."""

import gc


def left_by(function, *arguments):
    """The objects that only the collector would free."""
    function(*arguments)  # what is imported and made once
    gc.collect()
    gc.freeze()  # what exists now need not be looked at again
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
