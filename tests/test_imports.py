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
CORE = PACKAGE / "core"

# From the outside in. `__init__` re-exports names and `_ffi` is core's alone: rules of their own.
PYTHON_LAYERS = (
    ("__main__",),
    ("cli",),
    ("cli_arguments", "cli_plan", "terminal"),
    ("decoder",),
    ("fit", "model_arguments"),
    ("plan", "drafting"),
    ("decode", "text", "core", "brief"),
    ("account", "answer", "budget", "proposer", "rules"),
    ("cost_file", "gains"),
    ("calibration", "costs", "sampling", "tree"),
    ("chat", "proof", "results", "text_stream", "vocabulary"),
    ("machine_cache",),
    ("config", "gguf_metadata", "pair"),
)
COMMAND_FOLDERS = ("backend", "bench")
CORE_LAYERS = (("__init__",), ("sessions",), ("models",), ("ggml", "progress"))
NUMPY_ONLY = ("calibration", "config", "costs", "results", "sampling", "text_stream", "tree")
SOLE_IMPORTERS = {"cffi": {"_ffi"}, "llama_cpp": {"text"}, "jinja2": {"chat"}}

# Stems of csrc, a header and its source being one piece; a folder's files may include each other.
CPP_LAYERS = (
    ("api", "api_model", "api_session"),
    ("api_handles",),
    ("session_pass", "session_round"),
    ("session",),
    ("draft_state",),
    ("draft_output", "path_inputs"),
    ("drafter", "graph"),
    ("model",),
    ("arch/",),
    ("graph_sizes", "layers/", "weight_placement"),
    ("cache", "weights"),
    ("cell_masks",),
    ("scheduler",),
    ("devices", "input_block"),
    ("hparams", "metadata_keys", "packed_matrix"),
    ("backend", "cells", "gguf_file", "quantize", "select", "top_rows", "tree"),
    ("card", "device", "gguf_parts"),
    ("cpu/",),
    ("host",),
    ("error", "log_capture", "thread_count", "worker_threads", "zero_pages"),
    ("dflash", "gguf_schema"),
)


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
    """What each module of dflash_gguf imports; the folder of the core counts as one."""
    found = {
        path.stem: set(imports(path, PACKAGE, "dflash_gguf"))
        for path in sorted(PACKAGE.glob("*.py"))
    }
    core = (imports(path, PACKAGE, "dflash_gguf") for path in sorted(CORE.glob("*.py")))
    inside = "dflash_gguf.core"
    return found | {"core": {name for names in core for name in names if inside not in name}}


def layer_of(name: str, layers: tuple[tuple[str, ...], ...]) -> int:
    folder, slash, _ = name.partition("/")
    for number, members in enumerate(layers):
        if (folder + slash) in members:
            return number
    raise AssertionError(f"{name}: not in a layer of tests/test_imports.py")


def siblings(names: set[str]) -> set[str]:
    """Modules of dflash_gguf among dotted names."""
    found = {name.split(".")[1] for name in names if name.startswith("dflash_gguf.")}
    return {stem for stem in found if (PACKAGE / f"{stem}.py").is_file() or stem == CORE.name}


def test_the_package_points_one_way() -> None:
    for stem, names in package_imports().items():
        if stem == "__init__":
            continue
        for other in siblings(names) - {"_ffi"}:
            assert stem != "_ffi", f"dflash_gguf/_ffi.py imports {other}"
            ours, theirs = layer_of(stem, PYTHON_LAYERS), layer_of(other, PYTHON_LAYERS)
            assert theirs > ours, f"dflash_gguf/{stem}.py imports {other}"


@pytest.mark.parametrize("folder", COMMAND_FOLDERS)
def test_folders_of_commands_are_outermost(folder: str) -> None:
    for stem, names in package_imports().items():
        assert not any(name.startswith(f"dflash_gguf.{folder}") for name in names), stem
    for path in sorted((PACKAGE / folder).glob("*.py")):
        names = set(imports(path, PACKAGE, "dflash_gguf"))
        top = {name.split(".")[0] for name in names}
        assert not top & set(SOLE_IMPORTERS), path
        assert "_ffi" not in siblings(names), path
        assert "matplotlib" not in top or path.stem == "plot", path


def test_every_module_has_a_layer() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "_ffi"} | {CORE.name}
    assert found == {name for members in PYTHON_LAYERS for name in members}


def test_the_core_points_inwards() -> None:
    for path in sorted(CORE.glob("*.py")):
        names = set(imports(path, PACKAGE, "dflash_gguf"))
        inside = {name.split(".")[2] for name in names if name.startswith("dflash_gguf.core.")}
        ours = layer_of(path.stem, CORE_LAYERS)
        assert all(
            layer_of(other, CORE_LAYERS) > ours
            for other in inside
            if (CORE / f"{other}.py").is_file()
        ), path


def test_the_package_takes_only_names_from_convert() -> None:
    for stem, names in package_imports().items():
        taken = {name for name in names if name.startswith("dflash_gguf.convert.")}
        assert all(name.split(".")[2] == "schema" for name in taken), stem


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


def cpp_stem(path: Path) -> str:
    return path.relative_to(CSRC).with_suffix("").as_posix()


def cpp_includes() -> Iterator[tuple[str, str]]:
    """Pairs (file, quoted include) of csrc, both as stems relative to csrc."""
    for path in sorted(p for p in CSRC.rglob("*") if p.suffix in {".h", ".cpp"}):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            beside = path.parent / name
            theirs = cpp_stem(beside if beside.is_file() else CSRC / name)
            if theirs != cpp_stem(path):
                yield cpp_stem(path), theirs


def test_the_core_points_one_way() -> None:
    for ours, theirs in cpp_includes():
        below = layer_of(theirs, CPP_LAYERS) - layer_of(ours, CPP_LAYERS)
        same_folder = below == 0 and "/" in ours
        assert below > 0 or same_folder, f"csrc/{ours} includes {theirs}"


def test_every_source_has_a_layer() -> None:
    found = {cpp_stem(path).partition("/") for path in CSRC.rglob("*") if path.is_file()}
    members = {name for layer in CPP_LAYERS for name in layer}
    assert {folder + slash for folder, slash, _ in found} == members - {"gguf_schema"}


def test_an_architecture_knows_no_other() -> None:
    for ours, theirs in cpp_includes():
        if ours.startswith("arch/"):
            assert theirs == "arch/arch" or not theirs.startswith("arch/"), f"{ours}: {theirs}"


def test_the_public_header_needs_only_c() -> None:
    text = (CSRC / "dflash.h").read_text(encoding="utf-8")
    assert set(re.findall(r"#\s*include\s*(\S+)", text)) <= {"<stdint.h>", "<stddef.h>"}
