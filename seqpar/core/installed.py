"""Which versions of other distributions are installed."""

from __future__ import annotations

from importlib import metadata


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
