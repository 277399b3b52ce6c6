"""Reads training text from the standard library of the running Python.

A document is a module's source, or one function of it without indentation. Some modules, chosen by
a hash of their names, are held out: none of their text is trained on.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

# Folders without useful code: tests repeat themselves, encodings are tables, pydoc_data is prose.
SKIPPED = frozenset(
    ("test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages")
)
HELD_OUT_SHARE = 0.05
MAX_MODULE_BYTES = 400_000
FUNCTION_LINES = range(4, 81)


@dataclass(frozen=True, slots=True)
class Module:
    """A source file of the standard library. name: path relative to the library's folder."""

    name: str
    text: str

    @property
    def held_out(self) -> bool:
        """True if the module is for evaluation only."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def standard_library() -> list[Module]:
    """Returns all modules of Python's standard library; FileNotFoundError without sources."""
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
        raise FileNotFoundError(
            f"{root} holds no Python sources; install Python's standard library"
        )
    return found


def functions(module: Module) -> list[str]:
    """Returns the functions and methods of a module, each unindented."""
    lines = module.text.splitlines(keepends=True)
    found = []
    for node in ast.walk(ast.parse(module.text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        end = node.end_lineno or node.lineno
        if end - node.lineno + 1 in FUNCTION_LINES:
            text = textwrap.dedent("".join(lines[node.lineno - 1 : end])).rstrip() + "\n"
            # Skips methods with a string of unindented lines, which dedent cannot move.
            if not text[0].isspace():
                found.append(text)
    return found


def documents(modules: list[Module]) -> list[str]:
    """Returns the training documents: each module's source, and each of its functions."""
    return [text for module in modules for text in (module.text, *functions(module))]


def prompts(modules: list[Module]) -> list[str]:
    """Returns a prompt for each function: the lines of `def`, and the docstring if any."""
    found = [_head(text) for module in modules for text in functions(module)]
    return [head for head in found if head]


def _head(text: str) -> str:
    """Returns a function's `def` and docstring, or "" if the function has no other lines."""
    body = getattr(ast.parse(text).body[0], "body", [])
    if len(body) < 2:
        return ""
    is_doc = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    end = body[0].end_lineno if is_doc else body[0].lineno - 1
    lines = text.splitlines()
    return "\n".join(lines[:end]) + "\n" if end < len(lines) else ""
