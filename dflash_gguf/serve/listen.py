"""Listening sockets, connections with time limits, and the shutdown of a server on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from h11 import RemoteProtocolError
from h11._receivebuffer import ReceiveBuffer
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import error_body

HEADERS_S = 15.0
"""Seconds that the headers of a request may take to arrive."""
KEEP_ALIVE_S = 60
"""Seconds that a connection may stay idle between two requests."""
MAX_HEADERS = 64 << 10
GRACE_S = 3
"""Seconds that requests in flight get to end after a signal."""
ERRORS_S = 1
"""Seconds after GRACE_S in which clients can read how their requests ended."""
BACKLOG = 512
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted in one turn of the event loop. Their limit is enforced in the next
turn: when 512 were accepted at once, a flood took all open files."""
MAX_CONNECTIONS = 4096
OTHER_FILES = 96
"""Files that are left to model files, processes and their pipes."""
AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")
LENGTH = re.compile(rb"\ncontent-length[ \t]*:", re.IGNORECASE)
CHUNKED = re.compile(rb"\ntransfer-encoding[ \t]*:", re.IGNORECASE)
UNIX_SOCKET = ".sock"
"""Ending of a host that is the path of a Unix socket, as in llama-server."""


class _StrictBuffer(ReceiveBuffer):
    """h11's input, which refuses heads that a proxy before this server may read differently."""

    def maybe_extract_lines(self) -> Any:
        """Returns the lines of a head, None until it is whole. RemoteProtocolError for a bad one.

        h11 alone takes lines that end without CR, headers over several lines, and a length beside
        chunks, with which a request can hide in the body of another.
        """
        lines = super().maybe_extract_lines()
        if lines and (
            AMBIGUOUS.search(self._head)
            or (LENGTH.search(self._head) and CHUNKED.search(self._head))
        ):
            raise RemoteProtocolError("the head is ambiguous")
        return lines

    def _extract(self, count: int) -> Any:
        self._head = super()._extract(count)
        return self._head


class Connections:
    """Open connections of a server, at most `limit`.

    A connection beyond the limit replaces the oldest one without a whole request, of the address
    that has the most connections. So idle ones of a flood go first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._n = 0

    def add(self, one: Connection) -> bool:
        """Adds a connection; returns False if there is no place for it."""
        if self._n >= self.limit and not self._make_room():
            return False
        self._by_address.setdefault(one.address, {})[one] = None
        self._n += 1
        return True

    def discard(self, one: Connection) -> None:
        """Removes a connection, if it was added."""
        of_address = self._by_address.get(one.address, {})
        if one in of_address:
            del of_address[one]
            self._n -= 1
            if not of_address:
                del self._by_address[one.address]

    def _make_room(self) -> bool:
        for of_address in sorted(self._by_address.values(), key=len, reverse=True):
            for one in of_address:
                if one.lacks_request:
                    self.discard(one)
                    one.transport.abort()
                    return True
        return False


class Connection(H11Protocol):
    """HTTP connection with limits on the time for request headers and on unread data."""

    timeout_s = 600.0
    others: Connections
    address = ""
    _timer: asyncio.TimerHandle | None = None

    @property
    def lacks_request(self) -> bool:
        """True between two requests, and until the whole of a request has arrived."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: Any) -> None:
        """Starts the timer for request headers and sets the time limit for unread data."""
        super().connection_made(transport)
        self.conn._receive_buffer = _StrictBuffer()
        self.address = self.client[0] if self.client else ""
        if not self.others.add(self):
            transport.abort()
            return
        connected = transport.get_extra_info("socket")
        if connected is not None and connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux alone has a time limit for unread data
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
            self._keep_reading()
        elif was_idle and self._timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the header timer of a closed connection."""
        self._stop_waiting()
        self.others.discard(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answers malformed HTTP, whose defect h11 does not name for users."""
        sentence = "the request is not valid HTTP/1.1, or its headers exceed 64 KiB"
        body = msgspec.json.encode(error_body(400, sentence))
        head = (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _keep_reading(self) -> None:
        """Keeps reading after a request is complete, to notice that the client disconnects.

        uvicorn would stop reading until the response has ended.
        """
        if not self.cycle.more_body and self.flow.read_paused:
            if len(self.conn.trailing_data[0]) > MAX_HEADERS:
                self.transport.abort()
            else:
                self.flow.resume_reading()

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


@dataclass(frozen=True)
class Shutdown:
    """Callbacks of a server that is ending.

    begin: at the first signal. end_requests: answers all requests in flight, GRACE_S later.
    kill: at a second signal, before the process ends at once.
    """

    begin: Callable[[], None]
    end_requests: Callable[[], None]
    kill: Callable[[], None]


class Server(uvicorn.Server):
    """uvicorn server that answers requests in flight, and returns, after a signal."""

    def __init__(self, config: uvicorn.Config, shutdown: Shutdown) -> None:
        super().__init__(config)
        self._shutdown = shutdown

    def handle_exit(self, sig: int, frame: Any) -> None:  # noqa: ARG002
        """Begins the shutdown; a second signal ends the process at once."""
        if self.should_exit:
            self._shutdown.kill()
            os._exit(128 + sig)
        self.should_exit = True
        if sig:
            self._shutdown.begin()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections, a few at a time so that their limit can be kept."""
        await super().startup(sockets)
        for one in sockets or []:
            one.listen(BACKLOG)  # uvicorn has set the system's queue to ACCEPTED_AT_ONCE

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits for the requests in flight; answers those that take longer than GRACE_S."""
        clock = asyncio.get_running_loop().call_later(GRACE_S, self._shutdown.end_requests)
        try:
            await super().shutdown(sockets)
        finally:
            clock.cancel()

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


def server(
    app: ASGIApp,
    key_file: str | None,
    cert_file: str | None,
    timeout_s: float,
    shutdown: Shutdown,
) -> Server:
    """Returns an HTTP server. timeout_s: seconds until a client that reads nothing is cut off."""
    return Server(
        uvicorn.Config(
            app,
            http=type(
                "Connection",
                (Connection,),
                {"timeout_s": timeout_s, "others": Connections(_max_connections())},
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S + ERRORS_S,
            h11_max_incomplete_event_size=MAX_HEADERS,
            backlog=ACCEPTED_AT_ONCE,
            ssl_keyfile=key_file,
            ssl_certfile=cert_file,
        ),
        shutdown,
    )


def _max_connections() -> int:
    """Raises the limit of open files as far as possible; returns what it leaves to connections."""
    try:
        import resource
    except ImportError:
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + OTHER_FILES
    limit = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if resource.RLIM_INFINITY != soft < limit:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return max(limit - OTHER_FILES, limit // 2)


def checked_hosts(texts: Sequence[str]) -> list[str]:
    """Returns hosts without the brackets of IPv6 addresses. ValueError for a bad host."""
    hosts = []
    for text in texts:
        host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        if not host:
            raise ValueError("--host is empty, give an address such as 127.0.0.1")
        if not host.endswith(UNIX_SOCKET):
            try:
                socket.getaddrinfo(host, None)
            except (socket.gaierror, UnicodeError) as error:
                raise ValueError(
                    f"--host is {text!r}, must be an address or a name of this machine, without a "
                    f"port ({getattr(error, 'strerror', None) or error})"
                ) from None
        hosts.append(host)
    return hosts


def bind(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Returns a listening socket per host; port 0 takes any free port. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            if host.endswith(UNIX_SOCKET):
                sockets.append(_bind_path(host))
                continue
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
        place = host if host.endswith(UNIX_SOCKET) else f"{host}:{port}"
        raise OSError(error.errno, f"cannot listen on {place}: {error.strerror}") from None
    return sockets


def _bind_path(path: str) -> socket.socket:
    """Returns a listening Unix socket; replaces one that a dead server left. Raises OSError."""
    one = socket.socket(socket.AF_UNIX)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX) as other:
                if other.connect_ex(path) == errno.ECONNREFUSED:
                    os.unlink(path)
        one.bind(path)
        one.listen(BACKLOG)
    except OSError as error:
        one.close()
        # The error for a too long path has no strerror.
        raise OSError(error.errno, error.strerror or str(error)) from None
    return one


def address_of(one: socket.socket, scheme: str) -> str:
    """Returns the address of a listening socket for the log."""
    if one.family == socket.AF_UNIX:
        return f"unix:{one.getsockname()}"
    host, port = one.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def remove_files(hosts: Sequence[str]) -> None:
    """Removes the files of Unix sockets."""
    for host in hosts:
        if host.endswith(UNIX_SOCKET):
            Path(host).unlink(missing_ok=True)


def is_local(host: str) -> bool:
    """True if other machines cannot reach a host: a loopback address or a Unix socket."""
    if host.endswith(UNIX_SOCKET):
        return True
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    addresses = [str(address[0]).partition("%")[0] for *_, address in found]
    return bool(host) and all(ipaddress.ip_address(address).is_loopback for address in addresses)
