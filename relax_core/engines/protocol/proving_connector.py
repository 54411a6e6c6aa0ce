"""An aiohttp connector: on each new connection, the server must prove that it knows the token."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet

import aiohttp

from relax_core.engines.protocol.server_proof import ProofExchange, ServerUnproven


class ProvingConnector(aiohttp.TCPConnector):
    """Opens connections. Sends no request before the server has proven that it knows ``token``.

    The proof may take the session's ``sock_read`` time. Without a valid proof, `aiohttp.ClientError` is raised.
    """

    def __init__(self, token: str, **options: Any) -> None:
        super().__init__(**options)
        self._token = token
        self._proven: WeakSet[asyncio.BaseProtocol] = WeakSet()  # aiohttp uses one protocol object per connection

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        """Returns a new or reused connection with a proven server."""
        connection = await super().connect(req, traces, timeout)
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None or protocol in self._proven:
            return connection
        try:
            async with asyncio.timeout(timeout.sock_read):
                await self._prove(transport, protocol)
        except ServerUnproven as error:
            connection.close()
            raise aiohttp.ClientConnectionError(str(error)) from error
        except BaseException:
            connection.close()
            raise
        self._proven.add(protocol)
        return connection

    async def _prove(self, transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> None:
        address = transport.get_extra_info("peername")
        if address is None:
            raise ServerUnproven("the server closed the connection at once")
        exchange = ProofExchange(self._token, address=address)
        reader = _ExchangeReader(exchange, protocol)
        transport.set_protocol(reader)
        transport.write(exchange.request)
        await reader.done
        transport.set_protocol(protocol)


class _ExchangeReader(asyncio.Protocol):
    """Reads the server's proof in place of the session's protocol. ``done`` completes at the end of the exchange."""

    def __init__(self, exchange: ProofExchange, session: asyncio.BaseProtocol) -> None:
        self._exchange = exchange
        self._session = session
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        if self.done.done():
            return
        try:
            if self._exchange.feed(data):
                self.done.set_result(None)
        except ServerUnproven as error:
            self.done.set_exception(error)

    def eof_received(self) -> bool:
        self.data_received(b"")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.data_received(b"")
        self._session.connection_lost(error)
