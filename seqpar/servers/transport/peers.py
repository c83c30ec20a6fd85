"""Who is at the other end of a server's connections, and how much one key may have."""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """A connection to a server, and who opened it.

    Leases, caches, results and room for writes are kept by both fields, so another key never
    reaches what belongs to one key, whichever connection it uses.

    Attributes:
        route: the number that the server's socket gave the connection.
        key: the client's public key, which ZeroMQ authenticated, or "" without keys.
    """

    route: bytes
    key: str = ""


def fits(size: int, own: int, held: int, most: int, shared: bool) -> bool:
    """Return whether a key that has `own` of a resource may have `size` more.

    `held` is what all keys have, and `most` what there is. Where several keys share a resource, a
    key may have more only while it then has at most what stays free: n greedy keys leave 1/(n + 1)
    of it. A key that has nothing may take whatever is free.
    """
    if held + size > most:
        return False
    return not shared or not own or own + size <= most - held - size


def room(own: int, held: int, most: int, shared: bool) -> int:
    """Return how much more of a resource a key may have; the arguments are those of `fits`."""
    free = most - held
    return max(0, (free - own) // 2) if shared and own else free
