"""Make the certificates of attention servers and their clients."""

from __future__ import annotations

import argparse
from pathlib import Path

_FILES = """
a server needs server.crt, server.key, authorities/ and revoked/
a client needs client.crt, client.key and authorities/
authority.key signs certificates: it should stay where it is"""
_ROTATED = """
1. copy the new file in authorities/ to all servers and clients
2. copy the new certificates and keys (*.crt, *.key) to the servers and clients that they are for
3. remove the older files from all folders authorities/; until then, old certificates are valid"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--client", metavar="NAME", help="add a client: the folder DIR/clients/NAME")
    what.add_argument(
        "--rotate", action="store_true", help="make a new authority, and all certificates anew"
    )
    what.add_argument("--revoke", metavar="NAME", help="revoke the certificates of a client")


def run(arguments: argparse.Namespace) -> int:
    """Make the certificates, and print which files a server and a client need."""
    # Imported here, because `--help` must work without the extra.
    from seqpar.servers.transport import authority

    if not arguments.folder:
        # An empty path would be the working directory.
        raise ValueError("folder must be the path of a folder, got ''")
    folder = Path(arguments.folder)
    if arguments.client is not None:
        files = authority.add_client(folder, arguments.client)
        told = f"the client needs the files in {folder / 'clients' / arguments.client}"
    elif arguments.revoke is not None:
        files = authority.revoke(folder, arguments.revoke)
        told = "copy the new files in revoked/ to all servers; they refuse the client from then on"
    elif arguments.rotate:
        files, told = authority.rotate(folder), _ROTATED.strip()
    else:
        files, told = authority.generate(folder), _FILES.strip()
    for file in files:
        print(file)
    print(told)
    return 0
