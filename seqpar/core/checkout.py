"""Find `seqpar.kernels` in a checkout.

An installed seqpar contains the folder `triton_kernels/` as `seqpar/kernels/`. In a checkout, this
folder is next to `seqpar/`. Python imports the `seqpar/` of a checkout when it runs there, even if
seqpar is also installed.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parents[1]
_KERNELS = _PACKAGE.with_name("triton_kernels")


class _KernelsFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "seqpar.kernels":
            return None
        return importlib.util.spec_from_file_location(
            name, _KERNELS / "__init__.py", submodule_search_locations=[str(_KERNELS)]
        )


# In site-packages, a folder triton_kernels next to seqpar belongs to a different project.
if _KERNELS.is_dir() and not (_PACKAGE / "kernels").is_dir():
    sys.meta_path.append(_KernelsFinder)
