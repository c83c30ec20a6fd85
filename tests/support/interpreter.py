"""Let Triton's interpreter patch its language once per launch.

It also does so in every call of a device function, where all is patched already: a quarter of the
time of the kernels' tests.
"""

from triton import language
from triton.runtime import interpreter

_patch = interpreter._patch_lang


def _patch_once(function):
    modules = function.__globals__.values()
    languages = [x for x in modules if x is language or x is language.core]
    if languages and not any(language.core.is_builtin(x.load) for x in languages):
        return interpreter._LangPatchScope()
    return _patch(function)


interpreter._patch_lang = _patch_once
