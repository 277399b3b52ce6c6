"""Retired identifiers stay away, and no two public classes share a name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RETIRED = ROOT / "tests" / "support" / "retired_names.txt"
FOLDERS = ("convert", "csrc", "dflash_gguf", "docs", "scripts", "tests")
HISTORY = ("docs/develop/figures.md",)
"""Measurements of earlier commits, which name the code of their time."""


def sources() -> list[Path]:
    kinds = {".cpp", ".cu", ".h", ".md", ".py", ".sh"}
    paths = [ROOT / "README.md", *(x for folder in FOLDERS for x in (ROOT / folder).rglob("*"))]
    return [x for x in paths if x.suffix in kinds and x.relative_to(ROOT).as_posix() not in HISTORY]


def test_retired_names_stay_away() -> None:
    retired = set(RETIRED.read_text(encoding="utf-8").split())
    assert len(retired) >= 60
    for path in sources():
        back = retired & set(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
        assert not back, f"{path.relative_to(ROOT)}: {', '.join(sorted(back))}"


def test_no_two_public_classes_share_a_name() -> None:
    homes = defaultdict(set)
    for path in (ROOT / "dflash_gguf").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path.relative_to(ROOT).as_posix())
    assert not {name for name, files in homes.items() if len(files) > 1}
