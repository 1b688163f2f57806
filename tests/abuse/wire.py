"""Clients of raw sockets in asyncio: they stop, stall and leave where a library would not."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Iterable
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_ANSWER_S = 120.0


def head(path: str, length: int, *more: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more]
    return "\r\n".join([*lines, "", ""]).encode()


def message(path: str, body: Any, *more: str) -> bytes:
    """A whole request."""
    data = json.dumps(body).encode()
    return head(path, len(data), *more) + data


class Client:
    """One connection."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connected(cls, place: tuple[str, int], buffer_bytes: int = 0) -> Client:
        """buffer_bytes: of what the system receives for it; 0: as ever."""
        made = socket.socket()
        made.setblocking(False)
        if buffer_bytes:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await asyncio.get_running_loop().sock_connect(made, place)
        return cls(made)

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def read(self, most: int = 65536) -> bytes:
        async with asyncio.timeout(_ANSWER_S):
            return await self._loop.sock_recv(self.socket, most)

    async def until(self, mark: bytes) -> bytes:
        """What comes up to `mark`, or the end."""
        found = b""
        while mark not in found and (piece := await self.read()):
            found += piece
        return found

    async def rest(self) -> bytes:
        """What comes up to the end."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def leave(self, rudely: bool = False) -> None:
        """Closes; rudely: with a reset."""
        if rudely:
            linger = struct.pack("ii", 1, 0)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.socket.close()


async def asked(place: tuple[str, int], path: str, body: Any, buffer_bytes: int = 0) -> Client:
    """A connection on which a request was sent."""
    client = await Client.connected(place, buffer_bytes)
    await client.send(message(path, body))
    return client


async def answered(place: tuple[str, int], path: str, body: Any) -> tuple[int, bytes, bytes]:
    """Status, head and body of a request on a connection of its own."""
    client = await Client.connected(place)
    try:
        await client.send(message(path, body, "Connection: close"))
        return parted(await client.rest())
    finally:
        client.leave()


def parted(answer: bytes) -> tuple[int, bytes, bytes]:
    """Status, head and body of what came; status 0 where nothing did."""
    top, _, body = answer.partition(b"\r\n\r\n")
    return (int(top.split()[1]) if top.startswith(b"HTTP/1.1 ") else 0), top.lower(), body


async def together(work: Iterable[Awaitable[Any]]) -> list[Any]:
    """All results; the first failure is raised once all have ended."""
    found = await asyncio.gather(*work, return_exceptions=True)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return list(found)
