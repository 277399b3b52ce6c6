#!/usr/bin/env python3
"""Renders convert/schema.py to a C++ header: render_schema.py OUT.h.

Uses the standard library only, since CMake runs this script before dependencies are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCHEMA = Path(__file__).resolve().parent.parent / "convert" / "schema.py"


def load_schema() -> ModuleType:
    """Imports schema.py by path, so that the package need not be installed."""
    spec = importlib.util.spec_from_file_location("dflash_gguf_schema", SCHEMA)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{SCHEMA}: not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def render(schema: ModuleType) -> str:
    """Returns the C++ header's text; in names, `{arch}` becomes %s and `{bid}` becomes %d."""
    lines = ["// Rendered from convert/schema.py by scripts/render_schema.py.", "#pragma once", ""]
    lines += ["namespace dfl::schema {", ""]
    for prefix, group in (("ARCH", schema.Arch), ("KEY", schema.Key), ("TENSOR", schema.Tensor)):
        for name, value in schema.names_of(group).items():
            text = value.replace("{arch}", "%s").replace("{bid}", "%d")
            lines.append(f'inline constexpr const char * {prefix}_{name} = "{text}";')
        lines.append("")
    lines += ["} // namespace dfl::schema", ""]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Writes the header to the path in `arguments` if its text changes, to avoid a rebuild."""
    if len(arguments) != 1:
        print("usage: render_schema.py OUT.h", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    text = render(load_schema())
    if not out.is_file() or out.read_text(encoding="utf-8") != text:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
