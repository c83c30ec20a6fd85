"""Attention servers: separate processes that compute attention tasks for many trainers.

Start with `server/server.py`, the process, and `pool/`, its clients in trainers.
"""

from seqpar.servers.cache.server_cache import ServerCache
from seqpar.servers.pool.pool import ServerPool
from seqpar.servers.server_check import known_task
from seqpar.servers.wire.request import ServersError

__all__ = ["ServerCache", "ServerPool", "ServersError", "known_task"]
