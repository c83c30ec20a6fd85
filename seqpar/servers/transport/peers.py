"""Identifies the clients of a server, and divides its resources among their keys."""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """A connection to a server and the key that opened it.

    Leases, caches, results and arenas are stored under both. So one key never reaches what belongs
    to another key, whichever connection it uses.
    """

    route: bytes  # the number that the server's socket gave to the connection
    key: str = ""  # the client's public key, authenticated by ZeroMQ; "" without keys


def fits(size: int, own: int, held: int, most: int, shared: bool) -> bool:
    """Return whether a key that has `own` of a resource may have `size` more.

    All keys together have `held` of `most`. If several keys share a resource, a key may not have
    more than the part that then stays free, so n greedy keys leave 1/(n + 1) of the resource. A key
    that has nothing may take all that is free.
    """
    if held + size > most:
        return False
    return not shared or not own or own + size <= most - held - size


def room(own: int, held: int, most: int, shared: bool) -> int:
    """Return how much more of a resource a key may have, with the arguments of `fits`."""
    free = most - held
    return max(0, (free - own) // 2) if shared and own else free
