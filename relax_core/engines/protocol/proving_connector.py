"""Implements an aiohttp connector that makes each server prove on a new connection that it knows the token."""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakSet

import aiohttp

from relax_core.engines.protocol.server_proof import ProofExchange, ServerUnproven


class ProvingConnector(aiohttp.TCPConnector):
    """Opens connections on which nothing is sent before the server has proven that it knows ``token``.

    The exchange may take the session's ``sock_read`` time. Without the proof it raises `aiohttp.ClientError`.
    """

    def __init__(self, token: str, **options: Any) -> None:
        super().__init__(**options)
        self._token = token
        self._proven: WeakSet[asyncio.BaseProtocol] = WeakSet()  # aiohttp has one protocol for each connection

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        """Returns a new or reused connection whose server has sent its proof."""
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
    """Reads the server's answer in place of the session's own protocol; ``done`` ends with the exchange."""

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
