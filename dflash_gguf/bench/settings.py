"""Draft settings to compare, by names: "none", "chain 8", "tree 22", "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import MAX_DRAFT, MAX_TREE_BUDGET
from ..speculative.controller import AutoController, Controller, ControllerState, FixedController
from ..speculative.proposers.proposer import CHAIN, TREE

DEFAULT = "none,chain 4,chain 8,chain 15,tree 8,tree 16,tree 22,tree 32,tree 64,auto"
SHORT = "none,auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """A draft mode of DRAFT_KINDS, and its candidates per round (0 for "none" and "auto")."""

    kind: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.size else self.kind

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a DecodeConfig for this setting."""
        size = {"chain": "draft_max", "tree": "tree_budget"}.get(self.kind)
        return {"draft": self.kind, **({size: self.size} if size else {})}

    def controller(
        self, state: ControllerState, max_draft: int, max_nodes: int
    ) -> Controller | None:
        """Builds the setting's controller; None if plain. "auto" uses `state` and `max_nodes`."""
        if self.kind == "auto":
            return AutoController(state, max_draft, max_nodes)
        shape = {"chain": CHAIN, "tree": TREE}.get(self.kind)
        return FixedController(shape, self.size, max_draft) if shape else None


def parse_settings(text: str, max_draft: int) -> list[Setting]:
    """Parses names of settings; chains get at most max_draft candidates. ValueError if unknown."""
    settings: dict[Setting, None] = {}
    for name in text.split(","):
        kind, _, size = name.strip().partition(" ")
        setting = Setting(kind)
        if kind not in ("none", "auto") or size:
            if kind not in ("chain", "tree") or not size.strip().isdigit():
                raise ValueError(f"{name!r} is no setting, must be none, chain N, tree N or auto")
            max_size = MAX_DRAFT if kind == "chain" else MAX_TREE_BUDGET
            if not 1 <= int(size) <= max_size:
                raise ValueError(f"{name!r}: must have 1 to {max_size} candidates")
            setting = Setting(kind, min(int(size), max_draft) if kind == "chain" else int(size))
        settings[setting] = None
    return list(settings)


def levels(flag: str, text: str) -> list[int]:
    """Parses numbers like "1,4,8"; ValueError with the flag for other texts."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"{flag} {text}: must be numbers like 1,4,8")
    return list(dict.fromkeys(counts))
