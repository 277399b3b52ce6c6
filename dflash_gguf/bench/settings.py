"""Ways to draft that are compared, by their names: "none", "chain 8", "tree 22", "auto"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import MAX_TREE_BUDGET
from ..speculative.controller import AutoController, Controller, FixedController
from ..speculative.controller_state import Known
from ..speculative.proposers.proposer import CHAIN, TREE

DEFAULT = "none,chain 4,chain 8,chain 15,tree 8,tree 16,tree 22,tree 32,tree 64,auto"
SHORT = "none,auto"


@dataclass(frozen=True, slots=True)
class Setting:
    """kind: one of DRAFT_KINDS. size: candidates of a round; 0 where the kind says it all."""

    kind: str
    size: int = 0

    @classmethod
    def parse(cls, text: str, max_draft: int) -> Setting:
        """The setting of a name. ValueError if there is no such or the drafter is too short."""
        kind, _, size = text.strip().partition(" ")
        if kind in ("none", "auto") and not size:
            return cls(kind)
        if kind not in ("chain", "tree") or not size.strip().isdigit():
            raise ValueError(f"{text!r} is no setting, must be none, chain N, tree N or auto")
        setting, max_size = cls(kind, int(size)), max_draft if kind == "chain" else MAX_TREE_BUDGET
        if not 1 <= setting.size <= max_size:
            raise ValueError(f"{text!r}: must have 1 to {max_size} candidates")
        return setting

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.size else self.kind

    @property
    def fields(self) -> dict[str, Any]:
        """What it sets of a DecodeConfig."""
        size = {"chain": "draft_max", "tree": "tree_budget"}.get(self.kind)
        return {"draft": self.kind, **({size: self.size} if size else {})}

    def controller(self, known: Known, max_draft: int, max_nodes: int) -> Controller | None:
        """Returns its controller; `max_nodes` nodes for "auto", with what that has learned."""
        if self.kind == "auto":
            return AutoController(known, max_draft, max_nodes)
        shape = {"chain": CHAIN, "tree": TREE}.get(self.kind)
        return FixedController(shape, self.size, max_draft) if shape else None


def parse_settings(text: str, max_draft: int) -> list[Setting]:
    """A list of names; chains longer than the drafter's block are the block's."""
    settings: dict[str, Setting] = {}
    for name in text.split(","):
        setting = Setting.parse(name, 1 << 16 if name.strip().startswith("chain") else max_draft)
        if setting.kind == "chain":
            setting = Setting("chain", min(setting.size, max_draft))
        settings[str(setting)] = setting
    return list(settings.values())


def levels(flag: str, text: str) -> list[int]:
    """How many answers at once: the numbers of "1,4,8". ValueError for what is none."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"{flag} {text}: must be numbers like 1,4,8")
    return list(dict.fromkeys(counts))
