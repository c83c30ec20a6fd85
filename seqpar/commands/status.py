"""Show the load and state of attention servers."""

from __future__ import annotations

import argparse
from pathlib import Path

from seqpar.commands import seconds
from seqpar.servers.status_client import ask
from seqpar.servers.wire.protocol import ProtocolError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("addresses", nargs="+", metavar="ADDRESS")
    parser.add_argument("--keys", type=Path, help="the folder of keys; see keygen")
    parser.add_argument(
        "--timeout", type=seconds, default=5.0, help="seconds to wait for each server"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a table of servers. Returns 1 if a server does not answer."""
    heading = ["address", "clients", "tasks", "tokens", "GB", "waiting", "refused", "busy"]
    heading += ["caches", "GB of caches", "state"]
    rows, failed = [heading], False
    for address in arguments.addresses:
        try:
            status = ask(address, arguments.keys, arguments.timeout)
        except (TimeoutError, ProtocolError) as error:
            rows.append([address, *[""] * (len(heading) - 2), str(error)])
            failed = True
            continue
        shown = [status.clients, status.tasks, status.tokens, f"{status.bytes / 1e9:.2f}"]
        shown += [status.waiting, status.refused]
        shown.append(f"{status.busy_seconds / max(status.seconds, 1e-9):.0%}")
        shown += [status.caches, f"{status.cache_bytes / 1e9:.2f}"]
        state = "draining" if status.draining else f"ready on {status.device}"
        rows.append([address, *map(str, shown), state])
    widths = [max(len(row[i]) for row in rows if row[-1] or not i) for i in range(len(heading) - 1)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(n) for cell, n in zip(row[1:-1], widths[1:], strict=True)]
        print("  ".join([*cells, row[-1]]))
    return int(failed)
