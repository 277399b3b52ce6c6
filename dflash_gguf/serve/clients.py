"""Addresses of clients, also behind proxies."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
UNIX = "unix"
"""Address of all clients of a Unix socket."""


def networks(texts: Sequence[str]) -> list[Network]:
    """Returns the networks of --trusted-proxies. ValueError for a text that is none."""
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            raise ValueError(
                f"--trusted-proxies holds {text!r}, must be an IP address or a network such as "
                "10.0.0.0/8"
            ) from None
    return found


def address_of(scope: Any, headers: Headers, proxies: Sequence[Network]) -> str:
    """Returns the address of a request's client: of the last hop that is no trusted proxy.

    Each proxy appends the address that it serves to X-Forwarded-For.
    """
    peer = scope.get("client")
    address = peer[0] if peer else UNIX
    hops = [x.strip() for text in headers.getlist("x-forwarded-for") for x in text.split(",")]
    while hops and is_trusted(address, proxies):
        address = hops.pop()
    return address


def is_trusted(address: str, proxies: Sequence[Network]) -> bool:
    """True if an address is a trusted proxy's."""
    try:
        host = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(host, "ipv4_mapped", None) or host
    return any(mapped in network for network in proxies)
