"""Listens: sockets, connections that are bounded in time, the end on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 15.0
"""What the head of a request may take to arrive."""
KEEP_ALIVE_S = 60
"""What a connection may be idle for between two requests."""
MAX_HEADERS = 64 << 10
GRACE_S = 3
"""What requests in flight are given to end in, after a signal."""
BACKLOG = 512


class Connection(H11Protocol):
    """A connection on which nobody may dawdle over the head of a request, or over reading."""

    timeout_s = 600.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a head."""
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # else what is not read stays until it is
                milliseconds = min(int(1e3 * self.timeout_s), (1 << 31) - 1)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Takes a part of a request."""
        was_idle = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle:
            self._stop_waiting()
        elif was_idle and self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._timer = self.loop.call_later(min(HEADERS_S, self.timeout_s), self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


class Server(uvicorn.Server):
    """A server that ends by itself on a signal, with the exit code of who runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends on SIGINT and SIGTERM."""
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def server(app: ASGIApp, key_file: str | None, cert_file: str | None, timeout_s: float) -> Server:
    """A server of an application; `serve(sockets=...)` runs it.

    timeout_s: what a client may take to read what is sent to it.
    """
    return Server(
        uvicorn.Config(
            app,
            http=type("Connection", (Connection,), {"timeout_s": timeout_s}),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
            h11_max_incomplete_event_size=MAX_HEADERS,
            ssl_keyfile=key_file,
            ssl_certfile=cert_file,
        )
    )


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listening sockets on every address of the hosts.

    Raises:
        OSError: an unknown host, or an address that cannot be had.
    """
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            for family, kind, proto, _, address in dict.fromkeys(
                socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            ):
                one = socket.socket(family, kind, proto)
                sockets.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind(address)
                one.listen(BACKLOG)
                if port == 0:  # the other addresses get the same
                    port = one.getsockname()[1]
                break
    except OSError as error:
        for one in sockets:
            one.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sockets


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine reach a host's addresses."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
