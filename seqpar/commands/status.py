"""Show the load and state of attention servers."""

from __future__ import annotations

import argparse

from seqpar.commands import add_servers, seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_servers(parser)
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, help="seconds to wait for each server"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a table of servers. Returns 1 if a server does not answer."""
    # The imports need the extra "serve", and `--help` must work without it.
    from seqpar.servers.server.counters import HEADINGS, cells
    from seqpar.servers.status_client import StatusError, ask

    heading = ["address", *HEADINGS, "state"]
    rows, failed = [heading], False
    for address in arguments.addresses:
        try:
            status = ask(address, arguments.keys, arguments.timeout)
        except StatusError as error:
            rows.append([address, *[""] * (len(heading) - 2), str(error)])
            failed = True
            continue
        state = "draining" if status.draining else f"ready on {status.device}"
        rows.append([address, *cells(status), state])
    widths = [max(len(row[i]) for row in rows if row[-1] or not i) for i in range(len(heading) - 1)]
    for row in rows:
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(n) for cell, n in zip(row[1:-1], widths[1:], strict=True)]
        print("  ".join([*padded, row[-1]]))
    return int(failed)
