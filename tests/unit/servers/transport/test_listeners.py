"""Which addresses a process, and NIXL in it, listens at."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from seqpar.servers.status_client import ask
from seqpar.servers.transport.listeners import listeners
from seqpar.servers.transport.one_sided import available
from tests.support.faults import LIMIT

nixl = pytest.mark.skipif(not available(), reason="needs nixl")
# Makes two agents, lets one write to the other, and prints what each opened and what is open then.
EXCHANGE = """
    import asyncio, json, logging, socket
    import numpy as np
    from seqpar.servers.transport.listeners import listeners
    from seqpar.servers.transport.one_sided import OneSided

    logging.basicConfig(format="%(message)s")
    ends = [OneSided(name) for name in ("one", "two")]
    targets = [end.open("peer") for end in ends]
    for end, target in zip(ends, reversed(targets)):
        end.connect("peer", target)
    sent = np.arange(100, dtype=np.uint8)

    async def exchange():
        await ends[1].polling(ends[0].write("peer", [sent], 0))

    asyncio.run(exchange())
    assert (ends[1].read("peer", [100], 0)[0] == sent).all()
    opened = [end.addresses for end in ends]
    for host, port in (x.rsplit(":", 1) for x in sum(opened, []) if not x.startswith("unix:")):
        socket.create_connection((host.strip("[]"), int(port)), 5).close()
    print(json.dumps([opened, sorted(listeners())]))
"""


@pytest.mark.exhaustive
def test_listeners_of_this_process_alone():
    with (
        socket.create_server(("127.0.0.1", 0)) as own,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        socket.socket() as bound,
    ):
        abstract.bind(f"\0seqpar-{os.getpid()}")
        bound.bind(("127.0.0.1", 0))
        host, port = own.getsockname()
        expected = {f"{host}:{port}", f"unix:@seqpar-{os.getpid()}"}
        assert expected <= listeners()
        assert f"{host}:{bound.getsockname()[1]}" not in listeners()  # it does not listen
        code = "from seqpar.servers.transport.listeners import listeners; print(listeners())"
        other = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
        )
        assert other.stdout == "set()\n"
    assert not expected & listeners()


def test_listeners_of_ipv6():
    try:
        own = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("needs IPv6")
    with own:
        assert f"[::1]:{own.getsockname()[1]}" in listeners()


def run(code, **variables):
    """What a program prints, and its errors, with UCX's variable set or not."""
    env = {x: y for x, y in os.environ.items() if x != "UCX_NET_DEVICES"} | variables
    program = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        program, env=env, capture_output=True, text=True, check=False, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@nixl
def test_all_that_nixl_opens_is_named():
    printed, said = run(EXCHANGE)
    (first, second), at_the_end = json.loads(printed)
    for opened in first, second:
        assert any(not x.startswith("unix:") for x in opened)
    assert sorted([*first, *second]) == at_the_end
    assert said.count("UCX_NET_DEVICES is not set") == 2


@pytest.mark.exhaustive
@nixl
def test_nixl_listens_on_the_interface_that_ucx_is_given():
    printed, said = run(EXCHANGE, UCX_NET_DEVICES="lo")
    _, at_the_end = json.loads(printed)
    hosts = {x.rpartition(":")[0] for x in at_the_end}
    assert hosts - {"unix"} == {"127.0.0.1"}
    assert "UCX_NET_DEVICES" not in said


@pytest.mark.exhaustive
@nixl
def test_a_server_prints_what_nixl_opens(tmp_path):
    words = ["serve", "--bind", f"ipc://{tmp_path}/server", "--transports", "nixl"]
    env = os.environ | {"UCX_NET_DEVICES": "lo"}
    with subprocess.Popen(
        [sys.executable, "-m", "seqpar", *words], env=env, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            serving, opened = server.stdout.readline(), server.stdout.readline()
            assert serving.startswith("serving at ipc://")
            assert opened.startswith("NIXL listens at ") and "127.0.0.1:" in opened
            address = next(x for x in opened.split() if x.startswith("127.0.0.1:"))
            port = int(address.rpartition(":")[2].strip(",;"))
            socket.create_connection(("127.0.0.1", port), LIMIT).close()
            ask(f"ipc://{tmp_path}/server", None, LIMIT)  # then it handles SIGTERM
        finally:
            server.terminate()
        assert server.wait(LIMIT) == 0
