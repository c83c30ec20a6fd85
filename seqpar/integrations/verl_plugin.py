"""The entry point that verl loads when it is imported.

The module registers seqpar's engines if the variable `VERL_ENGINE_DEVICE` is "seqpar". verl logs
errors of plugins only at level DEBUG, so this module logs them itself.
"""

import logging
import os

if os.environ.get("VERL_ENGINE_DEVICE") == "seqpar":
    try:
        import seqpar.integrations.verl  # noqa: F401  # the import registers the engines
    except Exception:
        logging.getLogger(__name__).exception("seqpar's engines for verl cannot be registered")
        raise
