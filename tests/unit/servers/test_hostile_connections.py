"""Connections to a server that speak HTTP/2 badly or not at all."""

from seqpar.servers.transport.authority import generate
from tests.support.servers import ServerProcess
from tests.tools.hostile_connections import Attack, attack, attack_all


def test_hostile_connections_do_not_end_a_server(tmp_path):
    attack_all(200, tmp_path, [("ipc", False)])


def test_handshakes_in_clear_do_not_end_a_server_with_keys(tmp_path):
    """A gRPC server that changes its certificates at each handshake ends after 2,000 of them."""
    generate(tmp_path / "keys")
    server = ServerProcess("tcp://127.0.0.1:*", keys=tmp_path / "keys")
    try:
        for seed in range(10_000):
            attack(server.address, None, "a preface alone", 1 + 3 * seed).close()
            if seed % 1000 == 0:
                assert server.process.is_alive()
        assert Attack(server, tmp_path / "keys").run(range(0))
    finally:
        server.end()
