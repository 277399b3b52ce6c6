"""Exchanges of coding agents and of SDKs with a scripted server, as recorded in October 2026.

Long prompts and tool descriptions are placeholders of the same length.
"""

from __future__ import annotations

import json
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ARCHIVE = Path(__file__).with_name("recorded_agents.tar.xz")


class Exchange(NamedTuple):
    """A request and its recorded answer. path: without the query."""

    client: str
    scenario: str
    number: int
    path: str
    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.client}-{self.scenario}-{self.number}"


@lru_cache(maxsize=1)
def exchanges() -> tuple[Exchange, ...]:
    """Returns the recorded exchanges that have a body, in order."""
    found = []
    with tarfile.open(ARCHIVE) as archive:
        for name in sorted(archive.getnames()):
            if name.endswith(".json"):
                file = archive.extractfile(name)
                assert file is not None
                one = json.load(file)
                request = one["request"]
                if isinstance(request.get("body"), dict):
                    path = request["path"].split("?")[0]
                    names = one["client"], one["scenario"], one["number"], path
                    found.append(Exchange(*names, request["body"], one["response"]))
    return tuple(found)
