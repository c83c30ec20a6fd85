"""Check that attention servers answer right."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from seqpar.commands import seconds
from seqpar.servers.check import check
from seqpar.servers.status_client import ask
from seqpar.servers.transport.choose import transports_of
from seqpar.servers.wire.protocol import ProtocolError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Say what the command takes."""
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS")
    parser.add_argument("--keys", type=Path, help="the folder of keys; see keygen")
    parser.add_argument("--transports", nargs="+", choices=["zmq", "nixl"], help="to be checked")
    parser.add_argument("--timeout", type=seconds, default=5.0, help="seconds of connecting")


def run(arguments: argparse.Namespace) -> int:
    """Print a line a server and transport; return 1 if any is wrong."""
    torch.set_num_threads(1)
    failed = False
    for address in arguments.addresses:
        for transport in arguments.transports or _offered(address, arguments):
            found = check(address, transport, arguments.keys, arguments.timeout)
            failed |= bool(found.error)
            said = found.error or (
                f"right, {'the same bits as' if found.same_bits else 'rounded otherwise than'} here"
                f", {found.seconds * 1e3:.2f} ms, {found.bytes_per_second / 1e9:.2f} GB/s"
            )
            print(f"{address}  {transport}  {said}")
    return int(failed)


def _offered(address: str, arguments: argparse.Namespace) -> Sequence[str]:
    """Return the transports that both a server and this process have."""
    try:
        theirs = ask(address, arguments.keys, arguments.timeout).transports
    except (TimeoutError, ProtocolError):
        return ["zmq"]  # the check says what is wrong
    return [name for name in transports_of(None) if name in theirs]
