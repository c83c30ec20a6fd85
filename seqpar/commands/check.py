"""Check that attention servers compute correct results."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from seqpar.commands import add_servers, seconds
from seqpar.servers.check import check
from seqpar.servers.status_client import ask
from seqpar.servers.transport.choose import transports_of
from seqpar.servers.wire.protocol import ProtocolError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_servers(parser)
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=["zmq", "nixl"],
        help="transports to check; default: all that both sides have",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, help="seconds to wait for a connection"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print one line per server and transport. Returns 1 if a check fails."""
    torch.set_num_threads(1)
    failed = False
    for address in arguments.addresses:
        for transport in arguments.transports or _offered(address, arguments):
            found = check(address, transport, arguments.keys, arguments.timeout)
            failed |= bool(found.error)
            text = found.error or (
                f"correct, {'same bits as' if found.same_bits else 'rounded differently than'} here"
                f", {found.seconds * 1e3:.2f} ms, {found.bytes_per_second / 1e9:.2f} GB/s"
            )
            print(f"{address}  {transport}  {text}")
    return int(failed)


def _offered(address: str, arguments: argparse.Namespace) -> Sequence[str]:
    """Return the transports that both a server and this process have."""
    try:
        theirs = ask(address, arguments.keys, arguments.timeout).transports
    except (TimeoutError, ProtocolError):
        return ["zmq"]  # its check fails with the reason
    return [name for name in transports_of(None) if name in theirs]
