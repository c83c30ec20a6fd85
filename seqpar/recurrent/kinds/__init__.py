"""The kinds of recurrence, one a file, by name."""

from seqpar.core.arguments import shown
from seqpar.recurrent.kinds import (
    constant_decay,
    delta,
    gated_delta,
    kda,
    linear,
    scalar_decay,
    vector_decay,
)
from seqpar.recurrent.kinds.kind import Kind

_MODULES = (linear, constant_decay, scalar_decay, vector_decay, delta, gated_delta, kda)
KINDS = {module.KIND.name: module.KIND for module in _MODULES}


def kind(name: str) -> Kind:
    """Return the kind of this name; an unknown name raises a ValueError."""
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {shown(name)}")
    return KINDS[name]
