"""Runs the gateway of one run: ``python -m relax_core.server``, with the settings as one line of JSON on stdin.

It ends when its standard input is closed, so it ends with the supervisor that started it.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from relax_core.server.gateway_server import serve
from relax_core.server.gateway_settings import GatewaySettings

if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.stdin.buffer.readline(), type=GatewaySettings)))
