"""Addresses of clients behind trusted proxies."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from dflash_gguf.serve.clients import UNIX, address_of, networks

PROXIES = networks(["10.0.0.0/8", "127.0.0.1", "fd00::/8"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", ["203.0.113.9"], "192.0.2.1"),  # whoever is no proxy names nobody
        ("10.1.2.3", ["203.0.113.9"], "203.0.113.9"),
        ("10.1.2.3", ["1.1.1.1, 203.0.113.9"], "203.0.113.9"),  # the first is the client's word
        ("10.1.2.3", ["1.1.1.1", "203.0.113.9"], "203.0.113.9"),
        ("10.1.2.3", ["203.0.113.9, 10.9.9.9"], "203.0.113.9"),
        ("::ffff:10.1.2.3", ["203.0.113.9"], "203.0.113.9"),
        ("fd00::1", ["2001:db8::5"], "2001:db8::5"),
        ("10.1.2.3", ["10.9.9.9"], "10.9.9.9"),
        ("10.1.2.3", [], "10.1.2.3"),
        ("10.1.2.3", ["nonsense"], "nonsense"),
        (None, ["203.0.113.9"], UNIX),
    ],
)
def test_the_last_hop_that_is_no_proxy(
    peer: str | None, forwarded: list[str], address: str
) -> None:
    raw = [(b"x-forwarded-for", text.encode()) for text in forwarded]
    scope = {"client": (peer, 1) if peer else None}
    assert address_of(scope, Headers(raw=raw), PROXIES) == address


def test_networks_are_checked() -> None:
    with pytest.raises(ValueError, match="--trusted-proxies holds 'nginx'"):
        networks(["10.0.0.1", "nginx"])
