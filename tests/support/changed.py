"""Change attributes for a while, outside of a test's monkeypatch."""

import contextlib


@contextlib.contextmanager
def changed(owner, **values):
    """Within this context, attributes of `owner` have these values instead of their own."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
