"""Our own CUDA kernels, which a patch of ggml's dispatch joins to its CUDA backend.

As a part of that backend they run in its stream and in captured graphs. A node of ours has the type
GGML_OP_CUSTOM and a tag (csrc/cuda/custom_op.h); a backend without the patch does not support it.
"""

from __future__ import annotations

import re
from pathlib import Path

from ..native import Error, installed_file

PATCH = "csrc/cuda/ggml-cuda.patch"
PATCHED = "ggml-cuda.cu"


def kernel_folder() -> Path:
    """Returns the folder that #include lines of our CUDA files start from."""
    return installed_file(PATCH).parents[1]


def kernel_sources() -> list[Path]:
    """Returns the paths of our CUDA files."""
    return sorted((kernel_folder() / "cuda").glob("*.cu"))


def write_patched(ggml: Path, folder: Path) -> Path:
    """Writes ggml's file with the dispatch of nodes, patched, to a folder. Returns its path.

    Error if the patch does not fit ggml's sources.
    """
    text = (ggml / "src" / "ggml-cuda" / PATCHED).read_text(encoding="utf-8")
    path = folder / PATCHED
    path.write_text(patched(text, installed_file(PATCH).read_text(encoding="utf-8")), "utf-8")
    return path


def patched(text: str, patch: str) -> str:
    """Applies a unified diff to a text; Error unless each hunk fits exactly one place."""
    for hunk in re.split(r"^@@ .*\n", patch, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        before = "".join([line[1:] for line in lines if line[0] in " -"])
        after = "".join([line[1:] for line in lines if line[0] in " +"])
        if (n := text.count(before)) != 1:
            raise Error(
                f"a hunk of {PATCH} fits {n} places of {PATCHED}: the patch was made for other "
                "sources of ggml"
            )
        text = text.replace(before, after)
    return text
