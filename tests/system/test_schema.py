"""The C++ header written by scripts/render_schema.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from dflash_gguf.convert import schema

RENDER = Path(__file__).resolve().parents[2] / "scripts" / "render_schema.py"


def test_header_holds_every_name_and_is_left_alone_when_unchanged(tmp_path: Path) -> None:
    out = tmp_path / "gguf_schema.h"
    subprocess.run([sys.executable, str(RENDER), str(out)], check=True)
    text = out.read_text(encoding="utf-8")
    assert 'inline constexpr const char * TENSOR_ATTN_Q = "blk.%d.attn_q.weight";' in text
    assert 'inline constexpr const char * KEY_BLOCK_COUNT = "%s.block_count";' in text
    total = sum(len(schema.names_of(g)) for g in (schema.Arch, schema.Key, schema.Tensor))
    assert text.count("inline constexpr") == total
    assert "{" not in text.replace("namespace dfl::schema {", "")
    before = out.stat().st_mtime_ns
    subprocess.run([sys.executable, str(RENDER), str(out)], check=True)
    assert out.stat().st_mtime_ns == before
