"""How many bytes gRPC takes of streams that a server does not read."""

import asyncio
import contextlib

import grpc

from seqpar.servers.transport.options import server_options
from seqpar.servers.wire.limits import ServerDeadlines

PIECE = bytes(2**14)
STREAMS = 4


async def bytes_taken(path, options):
    """The most bytes that gRPC takes of one of a few streams that are not read.

    The connection has been fast before.
    """

    async def read(pieces, context):
        async for _ in pieces:
            pass
        return b""

    async def never_read(pieces, context):
        await asyncio.Event().wait()

    server = grpc.aio.server(options=options)
    handlers = {
        "Read": grpc.stream_unary_rpc_method_handler(read),
        "Leave": grpc.stream_unary_rpc_method_handler(never_read),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    taken = [0] * STREAMS

    async def fill(i):
        call = channel.stream_unary("/test/Leave")()
        while True:
            await call.write(PIECE)
            taken[i] += len(PIECE)

    try:
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            await channel.stream_unary("/test/Read")(bytes(2**21) for _ in range(500))
            calls = [asyncio.ensure_future(fill(i)) for i in range(STREAMS)]
            before = None
            while taken != before:  # until a second passes in which nothing is taken
                before = list(taken)
                await asyncio.sleep(1)
            for call in calls:
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await call
    finally:
        await server.stop(None)
    return max(taken)


def test_streams_that_are_not_read_take_little_memory(tmp_path):
    taken = asyncio.run(bytes_taken(tmp_path / "server", server_options(ServerDeadlines(), False)))
    assert 0 < taken <= 2**16 + 2**17  # the window, and what the client's side keeps
