"""What the server was told on the command line, as its parts use it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..config import DecodeConfig


@dataclass(frozen=True)
class Settings:
    """Of the whole server.

    keys: one of them is to come with every request; none: no request needs one.
    cors_origins: "localhost", "*", or origins; where a browser's pages may ask from.
    decode: what holds where a request does not say.
    slot_save_path: a folder for files of slots.
    n_batch: prompt tokens between two reports of progress.
    timeout_s: what a client may take to send a request, or to read what is sent to it.
    keep_alive_s: silence after which a stream shows that it lives.
    """

    decode: DecodeConfig = field(default_factory=DecodeConfig)
    keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ("localhost",)
    tags: tuple[str, ...] = ()
    has_metrics: bool = False
    has_slots: bool = True
    slot_save_path: Path | None = None
    verbose: bool = False
    n_batch: int = 2048
    timeout_s: float = 600.0
    keep_alive_s: float = 10.0
    max_body_bytes: int = 64 << 20
