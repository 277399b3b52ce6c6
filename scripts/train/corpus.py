"""Python code to train on: what the running Python's own installation holds.

A document is a whole module, or one function of it by itself, moved to the left margin. Which
modules are held out depends on their names only, so no text of them is ever trained on.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

# Tests repeat themselves; encodings and pydoc_data are tables and prose, not code.
SKIPPED = frozenset(
    ("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages")
)
HELD_OUT_SHARE = 0.05
MAX_MODULE_BYTES = 400_000
FUNCTION_LINES = range(4, 81)


@dataclass(frozen=True, slots=True)
class Module:
    """One source file of the standard library, `name` being its path below the library's."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether this module is for evaluation only."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def standard_library() -> list[Module]:
    """The modules of the running Python, sorted by name.

    Raises:
        FileNotFoundError: this Python comes without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED.intersection(relative.parts) or path.stat().st_size > MAX_MODULE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError):
            continue
        if text.strip():
            found.append(Module(relative.as_posix(), text))
    if not found:
        raise FileNotFoundError(f"{root} holds no Python sources")
    return found


def functions(module: Module) -> list[str]:
    """The functions and methods of a module, each as a text of its own, unindented."""
    lines = module.text.splitlines(keepends=True)
    found = []
    for node in ast.walk(ast.parse(module.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        end = node.end_lineno or node.lineno
        if end - node.lineno + 1 in FUNCTION_LINES:
            text = textwrap.dedent("".join(lines[node.lineno - 1 : end])).rstrip() + "\n"
            # Strings that reach the left margin keep a method's text from going there.
            if not text[0].isspace():
                found.append(text)
    return found


def documents(modules: list[Module]) -> list[str]:
    """Each module whole, and each of its functions by itself."""
    return [text for module in modules for text in (module.text, *functions(module))]


def prompts(modules: list[Module]) -> list[str]:
    """How functions begin: the line of `def`, with the docstring where there is one."""
    found = [_head(text) for module in modules for text in functions(module)]
    return [head for head in found if head]


def _head(text: str) -> str:
    """The beginning of a function; empty where nothing follows it."""
    body = getattr(ast.parse(text).body[0], "body", [])
    if len(body) < 2:
        return ""
    is_doc = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    end = body[0].end_lineno if is_doc else body[0].lineno - 1
    lines = text.splitlines()
    return "\n".join(lines[:end]) + "\n" if end < len(lines) else ""
