"""llama.cpp's speculative decoder runs a converted drafter."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from checkpoints import make_drafter
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from peer import peer_tools
from smollm2 import GGUF, make_smollm2_without_weights

TAPS = [1, 14, 27]


@pytest.mark.model
def test_draft_dflash_accepts_our_drafter(tmp_path: Path) -> None:
    target = make_smollm2_without_weights(tmp_path / "target")
    drafter = make_drafter(
        tmp_path / "drafter",
        target,
        dtype="bfloat16",
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        dflash_config={"target_layer_ids": TAPS, "mask_token_id": 4},
    )
    path = tmp_path / "drafter.gguf"
    conversion = prepare(drafter, "q8_0", Options(target))
    write_gguf(path, conversion.metadata, conversion.plans, conversion.types)

    command = [str(peer_tools() / "llama-speculative-simple"), "-m", str(GGUF), "-md", str(path)]
    command += ["--spec-type", "draft-dflash", "--spec-draft-n-max", "7", "--no-repack"]
    command += ["-p", "def add(a, b):", "-n", "8", "--temp", "0", "-t", "1", "-c", "256"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert f"block_size=8, mask_token_id=4, n_extract={len(TAPS)}" in output
    drafted = re.search(r"n_drafted\s*=\s*(\d+)", output)
    assert drafted is not None, output[-3000:]
    # Random drafts are never accepted: each round drafts 7 tokens and yields one.
    assert int(drafted[1]) >= 7 * 6
