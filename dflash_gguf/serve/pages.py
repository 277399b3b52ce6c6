"""Checks that tell the requests of programs from those of web pages in the user's browser."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers

LOCAL_SUFFIXES = (".localhost", ".local", ".internal")
"""Endings of host names that no name server of the Internet resolves."""
APP_SCHEMES = ("app", "tauri", "vscode-file", "vscode-webview")
"""Schemes of pages that installed programs show and web sites cannot have."""
ANY = "*"
LOCAL = "localhost"
"""Entry of --cors-origins that stands for pages of this machine and of installed programs."""


class PageChecks:
    """Checks the headers by which a request of another site's page shows itself.

    A page may send requests to any address, and may give its own name the address of this machine
    (DNS rebinding); its browser then reads the answers as those of the page's own site.
    """

    def __init__(self, origins: Sequence[str], hosts: Sequence[str]) -> None:
        """origins: those of --cors-origins. hosts: those of --host and --allowed-hosts."""
        self._origins = origins
        self._hosts = {host.lower() for host in hosts}

    def refusal(self, method: str, headers: Headers) -> str | None:
        """Returns a sentence that refuses a request which another site's page may have sent."""
        host = headers.get("host", "")
        if not self._is_known(_name_of(host)):
            return (
                f"Host is {host[:200]!r}, must be an IP address, a name without dots, a name in "
                ".localhost, .local or .internal, or one of --allowed-hosts"
            )
        if method in ("GET", "HEAD", "OPTIONS"):  # they change nothing
            return None
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site in ("same-origin", "none") or (site is None and origin is None):
            return None
        # Browsers send Sec-Fetch-Site only over HTTPS or to localhost; without it compare Origin.
        if origin is not None and (self.may_read(origin) or _host_of(origin) == host.lower()):
            return None
        return (
            f"a web page of {(origin or 'another site')[:200]} sent the request: name its origin "
            "in --cors-origins, or give the server an --api-key"
        )

    def may_read(self, origin: str) -> bool:
        """True if pages of an origin may read responses."""
        if ANY in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            host = parts.hostname or ""
        except ValueError:
            return False
        is_local = parts.scheme in APP_SCHEMES or (
            parts.scheme in ("http", "https") and _is_loopback(host)
        )
        return LOCAL in self._origins and is_local

    def _is_known(self, host: str) -> bool:
        is_plain = "." not in host or host.endswith(LOCAL_SUFFIXES)
        return is_plain or _is_address(host) or host in self._hosts or ANY in self._hosts


def _host_of(origin: str) -> str:
    """Returns host and port of a web site's origin, as its requests have them in Host."""
    scheme, _, host = origin.partition("://")
    return host.lower() if scheme in ("http", "https") else ""


def _name_of(host: str) -> str:
    """Returns a Host header's name: without port, brackets of IPv6 and the dot of the root."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".").lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == LOCAL or host.endswith(f".{LOCAL}")
