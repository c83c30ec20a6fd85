"""A gRPC server whose answer is a function of the call's context, and a client for it."""

import contextlib

import grpc
import grpc.aio

from seqpar.servers.transport.addresses import bind_target, bound
from seqpar.servers.transport.routes import CHANNEL_OPTIONS


class _Answers(grpc.GenericRpcHandler):
    def __init__(self, answer):
        self._answer = answer

    def service(self, handler_call_details):
        async def handle(request, context):
            return str(self._answer(context)).encode()

        return grpc.unary_unary_rpc_method_handler(handle)


@contextlib.asynccontextmanager
async def echo_server(address, answer=lambda context: "here"):
    """Serve within this context; yield the address with its port."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Answers(answer),))
    port = server.add_insecure_port(bind_target(address))
    await server.start()
    try:
        yield bound(address, port)
    finally:
        await server.stop(None)


async def call(target, options=CHANNEL_OPTIONS):
    """Call a server once, and return its answer."""
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        return (await channel.unary_unary("/echo/Echo")(b"", timeout=20)).decode()
