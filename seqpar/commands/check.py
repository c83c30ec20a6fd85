"""Check that attention servers compute correct results."""

from __future__ import annotations

import argparse

import torch

from seqpar.commands import add_servers, seconds
from seqpar.servers.server_check import check
from seqpar.servers.transport.addresses import check_peer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_servers(parser)
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=["grpc", "nixl"],
        default=["grpc"],
        help="transports to check",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, help="seconds to wait for a connection"
    )


def run(arguments: argparse.Namespace) -> int:
    for address in arguments.addresses:
        check_peer("address", address)
    torch.set_num_threads(1)
    failed = False
    for address in arguments.addresses:
        for transport in arguments.transports:
            found = check(address, transport, arguments.keys, arguments.timeout)
            failed |= bool(found.error)
            text = found.error or (
                f"correct, {'same bits as' if found.same_bits else 'rounded differently than'} here"
                f", {found.seconds * 1e3:.2f} ms, {found.bytes_per_second / 1e9:.2f} GB/s"
            )
            print(f"{address}  {transport}  {text}")
    return int(failed)
