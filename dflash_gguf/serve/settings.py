"""Settings of the HTTP server from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..config import DecodeConfig
from .clients import Network


@dataclass(frozen=True)
class Settings:
    """Settings of the whole HTTP server.

    keys: API keys; if there are any, each request needs one.
    shares_prefixes: True if requests with different keys reuse each other's texts.
    cors_origins: origins whose web pages may send requests: "localhost" (of this machine and of
    installed programs), "*", or exact origins.
    trusted_proxies: networks of proxies whose X-Forwarded-For names the client.
    allowed_hosts: further names of this server in Host headers, "*" for any.
    decode: default sampling settings of requests. given: names of those that flags have set, which
    a model's recommended values do not replace.
    slot_save_path: folder for saved prefixes of slots; None switches saving off.
    max_slot_bytes: bytes of each API key's files there beyond which nothing more is saved.
    n_batch: prompt tokens between two progress events.
    max_answers: answers of one request, n for each prompt.
    timeout_s: seconds that a client may take to send a request body or to read a response.
    keep_alive_s: seconds of silence before a stream sends a keep-alive comment.
    """

    decode: DecodeConfig = field(default_factory=DecodeConfig)
    given: frozenset[str] = frozenset()
    keys: tuple[str, ...] = ()
    shares_prefixes: bool = False
    cors_origins: tuple[str, ...] = ("localhost",)
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[Network, ...] = ()
    tags: tuple[str, ...] = ()
    has_metrics: bool = False
    has_slots: bool = True
    slot_save_path: Path | None = None
    max_slot_bytes: int = 16 << 30
    verbose: bool = False
    n_batch: int = 2048
    timeout_s: float = 600.0
    keep_alive_s: float = 10.0
    max_body_bytes: int = 64 << 20
    max_answers: int = 256

    def unset(self, recommended: Mapping[str, float]) -> dict[str, float]:
        """Returns a model's recommended values of the settings that no flag has set."""
        return {name: value for name, value in recommended.items() if name not in self.given}

    def defaults(self, recommended: Mapping[str, float]) -> DecodeConfig:
        """Returns the default settings of requests to a model with recommended values."""
        return replace(self.decode, **self.unset(recommended))  # type: ignore[arg-type]
