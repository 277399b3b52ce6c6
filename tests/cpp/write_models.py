"""Writes the models that C++ tests load: `write_models.py FOLDER TYPE...`.

KIND-TYPE.gguf and drafter-TYPE.gguf have matrices of one type. small-KIND.gguf have odd widths;
lasting.gguf has recurrent states that decay slowly.
"""

from __future__ import annotations

import sys
from pathlib import Path

from small_models import SHAPES, WIDE_TYPE, write_small, write_small_drafter

folder, types = Path(sys.argv[1]), sys.argv[2:]
folder.mkdir(exist_ok=True)
for type_name in types:
    for kind in SHAPES:
        # Our kernels need whole blocks per row, and have none for Gemma 4 E's per-layer embeddings.
        if kind not in ("llama, heads of 40", "gemma4e"):
            path = folder / f"{kind}-{type_name}.gguf"
            write_small(path, kind, type_name, is_wide=True)
    drafter = folder / f"drafter-{type_name}.gguf"
    write_small_drafter(drafter, "llama", type_name, folder / f"llama-{type_name}.gguf", WIDE_TYPE)
for kind in ("llama", "qwen35"):
    write_small(folder / f"small-{kind}.gguf", kind, "f32")
write_small(folder / "lasting.gguf", "qwen35", "f32", decay_bias=-7.0)
