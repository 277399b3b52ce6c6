"""Listening sockets, connections with time limits, and shutdown on a signal."""

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
"""Seconds that the headers of a request may take to arrive."""
KEEP_ALIVE_S = 60
"""Seconds that a connection may stay idle between two requests."""
MAX_HEADERS = 64 << 10
GRACE_S = 3
"""Seconds that requests in flight get to end after a signal."""
BACKLOG = 512


class Connection(H11Protocol):
    """HTTP connection with limits on the time for request headers and on unread data."""

    timeout_s = 600.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Starts the timer for request headers and sets the time limit for unread data."""
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only; other systems have no limit
                milliseconds = min(int(1e3 * self.timeout_s), (1 << 31) - 1)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Passes received bytes on. The header timer runs only between requests."""
        was_idle = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        is_idle = self.cycle is None or self.cycle.response_complete
        if not is_idle:
            self._stop_waiting()
        elif was_idle and self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the header timer of a closed connection."""
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
    """uvicorn server that returns after a signal, where uvicorn would raise the signal again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles SIGINT and SIGTERM while the server runs."""
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
    """Returns an HTTP server. timeout_s: seconds until a client that reads nothing is cut off."""
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
    """Returns a listening socket per host; port 0 takes any free port. Raises OSError."""
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
                if port == 0:  # other hosts use the port chosen for the first host
                    port = one.getsockname()[1]
                break
    except OSError as error:
        for one in sockets:
            one.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sockets


def is_loopback(host: str) -> bool:
    """True if a host is a loopback address, which other machines cannot reach."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
