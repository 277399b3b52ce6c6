"""The import arrows, read from the sources: who may import whom, in Python and in C++.

A file may reach files of lower layers only. A new file is put into a layer here.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, CONVERT, CSRC = ROOT / "dflash_gguf", ROOT / "convert", ROOT / "csrc"

# From the outside in. `__init__` re-exports names and `_ffi` is core's alone: rules of their own.
PYTHON_LAYERS = (
    ("__main__",),
    ("cli",),
    ("decoder",),
    ("decode",),
    ("text", "core"),
    ("vocabulary", "chat", "proof"),
    ("sampling", "results", "text_stream", "gguf_metadata"),
    ("config",),
)
NUMPY_ONLY = ("sampling", "results", "text_stream", "config")
SOLE_IMPORTERS = {"cffi": {"_ffi"}, "llama_cpp": {"text"}}

# Stems of csrc; a header and its source are one piece.
CPP_LAYERS = (
    ("api",),
    ("session",),
    ("graph", "cache", "arch/"),
    ("layers",),
    ("gguf_file", "backend", "quantize"),
    ("error",),
    ("dflash", "gguf_schema"),
)
ARCH_MAY_INCLUDE = {"arch/arch", "layers", "gguf_file", "cache", "error", "dflash", "gguf_schema"}


def imports(path: Path, root: Path, package: str) -> Iterator[str]:
    """Absolute dotted names that a module imports; `from . import x` gives `package.x`."""
    parts = [package, *path.relative_to(root).with_suffix("").parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_imports() -> dict[str, set[str]]:
    return {
        path.stem: set(imports(path, PACKAGE, "dflash_gguf"))
        for path in sorted(PACKAGE.glob("*.py"))
    }


def layer_of(name: str, layers: tuple[tuple[str, ...], ...]) -> int:
    for number, members in enumerate(layers):
        if name in members or f"{name.split('/')[0]}/" in members:
            return number
    raise AssertionError(f"{name}: not in a layer of tests/test_imports.py")


def siblings(names: set[str]) -> set[str]:
    """Modules of dflash_gguf among dotted names."""
    found = {name.split(".")[1] for name in names if name.startswith("dflash_gguf.")}
    return {stem for stem in found if (PACKAGE / f"{stem}.py").is_file()}


def test_the_package_points_one_way() -> None:
    for stem, names in package_imports().items():
        if stem == "__init__":
            continue
        for other in siblings(names) - {"_ffi"}:
            assert stem != "_ffi", f"dflash_gguf/_ffi.py imports {other}"
            ours, theirs = layer_of(stem, PYTHON_LAYERS), layer_of(other, PYTHON_LAYERS)
            assert theirs > ours, f"dflash_gguf/{stem}.py imports {other}"


def test_the_door_to_c_has_one_user() -> None:
    users = {stem for stem, names in package_imports().items() if "_ffi" in siblings(names)}
    assert users == {"core"}
    for path in CONVERT.rglob("*.py"):
        names = set(imports(path, CONVERT, "dflash_gguf.convert"))
        assert not any("_ffi" in name for name in names), path


@pytest.mark.parametrize("library", SOLE_IMPORTERS)
def test_a_wrapped_library_has_one_importer(library: str) -> None:
    found = {
        stem
        for stem, names in package_imports().items()
        if any(name.split(".")[0] == library for name in names)
    }
    assert found <= SOLE_IMPORTERS[library]
    for path in CONVERT.rglob("*.py"):
        names = imports(path, CONVERT, "dflash_gguf.convert")
        assert library not in {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize("stem", NUMPY_ONLY)
def test_pure_modules_need_numpy_at_most(stem: str) -> None:
    names = package_imports()[stem]
    top = {name.split(".")[0] for name in names} - {"dflash_gguf"}
    assert top <= sys.stdlib_module_names | {"numpy"}
    assert siblings(names) <= {"config"}


def test_convert_takes_only_the_quantiser_from_the_package() -> None:
    found = {}
    for path in sorted(CONVERT.rglob("*.py")):
        for name in imports(path, CONVERT, "dflash_gguf.convert"):
            if name.startswith("dflash_gguf") and not name.startswith("dflash_gguf.convert"):
                found.setdefault(path.name, set()).add(name)
    assert len(found) <= 1, found
    for names in found.values():
        assert {name for name in names if name.count(".") > 1} == {"dflash_gguf.core.quantize"}


def test_nothing_imports_tests_or_scripts() -> None:
    modules = {path.stem for folder in ("tests", "scripts") for path in ROOT.glob(f"{folder}/*.py")}
    for root, package in ((PACKAGE, "dflash_gguf"), (CONVERT, "dflash_gguf.convert")):
        for path in root.rglob("*.py"):
            top = {name.split(".")[0] for name in imports(path, root, package)}
            assert not top & (modules | {"tests", "scripts"}), path


def cpp_includes() -> Iterator[tuple[str, str]]:
    """Pairs (file, quoted include) of csrc, both as stems relative to csrc."""
    for path in sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp"}):
        ours = path.relative_to(CSRC).with_suffix("").as_posix()
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            beside = (path.parent / name).resolve()
            target = beside if beside.is_file() else (CSRC / name).resolve()
            yield ours, target.relative_to(CSRC).with_suffix("").as_posix()


def test_the_core_points_one_way() -> None:
    for ours, theirs in cpp_includes():
        if ours == theirs:
            continue
        below = layer_of(theirs, CPP_LAYERS) - layer_of(ours, CPP_LAYERS)
        inside_arch = ours.startswith("arch/") and theirs.startswith("arch/")
        assert below > 0 or inside_arch, f"csrc/{ours} includes {theirs}"


def test_an_architecture_knows_no_session_and_no_other_architecture() -> None:
    for ours, theirs in cpp_includes():
        if ours.startswith("arch/") and ours != "arch/arch" and ours != theirs:
            assert theirs in ARCH_MAY_INCLUDE, f"csrc/{ours} includes {theirs}"


def test_the_public_header_needs_only_c() -> None:
    text = (CSRC / "dflash.h").read_text(encoding="utf-8")
    assert set(re.findall(r"#\s*include\s*(\S+)", text)) <= {"<stdint.h>", "<stddef.h>"}
