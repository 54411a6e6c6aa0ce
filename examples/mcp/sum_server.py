"""A small MCP server with two tools: the sum of numbers, and a running total per server process.

The server uses stdin and stdout, or HTTP with ``--port``. It needs the package `mcp`.
"""

from __future__ import annotations

import argparse

from mcp.server import MCPServer

server = MCPServer("sum")
total = 0


@server.tool()
def add(numbers: list[int]) -> int:
    """Returns the sum of whole numbers."""
    return sum(numbers)


@server.tool()
def remember(number: int) -> int:
    """Adds a number to the total of this process, and returns the total."""
    global total
    total += number
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, help="serve HTTP there, at /mcp")
    port = parser.parse_args().port
    if port is None:
        server.run()
    else:
        server.run("streamable-http", port=port)
