"""Let Python find `seqpar.kernels`, the folder triton_kernels, in a tree that is not installed.

Python imports this by its name, in every process whose PYTHONPATH has its folder.
"""

import importlib.util
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "triton_kernels"


class Finder:
    """Finds one module."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "seqpar.kernels":
            return None
        file, folders = KERNELS / "__init__.py", [str(KERNELS)]
        return importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=folders
        )


sys.meta_path.append(Finder)
