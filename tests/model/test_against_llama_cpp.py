"""Converted files equal those of llama.cpp's convert_hf_to_gguf.py: metadata, tensors, bytes.

Only the order of metadata and tensors differs, on which no reader depends.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from checkpoints import make_drafter, make_target
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.gguf_header import read_header
from dflash_gguf.convert.write import write_gguf
from peer import PeerJob, run_peer_converter
from smollm2 import make_smollm2

OUTTYPES = ("f32", "f16", "bf16", "q8_0")


@dataclass(frozen=True)
class Case:
    """A checkpoint folder and an output type for both converters."""

    folder: str
    outtype: str
    pre: str | None
    target: str | None = None
    mtp: bool = True

    @property
    def name(self) -> str:
        return f"{self.folder}-{self.outtype}" + ("" if self.mtp else "-no-mtp")


CASES = [
    Case("smollm2", "q8_0", None),
    Case("smollm2-dflash", "q8_0", None, target="smollm2"),
    *(Case("qwen35", outtype, "qwen35") for outtype in OUTTYPES),
    Case("qwen35", "f32", "qwen35", mtp=False),
    *(Case("qwen35-dflash", outtype, "qwen35", target="qwen35") for outtype in OUTTYPES),
    Case("qwen35-sliding", "q8_0", "qwen35", target="qwen35"),
    Case("llama", "q8_0", "llama-bpe"),
    Case("llama", "f16", "llama-bpe"),
    Case("qwen3", "q8_0", "qwen2"),
    Case("qwen3moe", "q8_0", "qwen2"),
    Case("qwen35moe", "q8_0", "qwen35"),
    Case("qwen3next", "q8_0", "qwen2"),
    Case("gpt-oss", "f32", "gpt-4o"),
    Case("gpt-oss", "q8_0", "gpt-4o"),
    Case("gpt-oss-packed", "bf16", "gpt-4o"),
    Case("qwen2", "q8_0", "qwen2"),
    Case("gemma3", "q8_0", None),
    *(Case("gemma4", outtype, None) for outtype in OUTTYPES),
    Case("gemma4moe", "q8_0", None),
    Case("gemma4e", "q8_0", None),
    Case("gemma4-unified", "bf16", None),
    Case("gpt-oss-dflash", "bf16", "gpt-4o", target="gpt-oss"),
    Case("gemma4-dflash", "bf16", None, target="gemma4"),
]


def make_folders(base: Path) -> None:
    bf16 = {"dtype": "bfloat16"}
    make_smollm2(base / "smollm2")
    make_target(base / "qwen35", "qwen35", wrapped=True, mtp=True, linear_num_value_heads=6, **bf16)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    make_target(base / "llama", "llama", attention_bias=True, rope_parameters=rope, **bf16)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 128}  # fmt: skip
    make_target(base / "qwen3", "qwen3", rope_parameters=yarn, tie_word_embeddings=True, **bf16)
    make_target(base / "qwen3moe", "qwen3moe", **bf16)
    make_target(base / "qwen3next", "qwen3next", mtp=True, **bf16)
    make_target(base / "qwen35moe", "qwen35moe", wrapped=True, fused_experts=True, mtp=True, **bf16)
    make_target(base / "gpt-oss", "gpt-oss", **bf16)
    make_target(base / "gpt-oss-packed", "gpt-oss", packed_experts=True, **bf16)
    make_target(base / "qwen2", "qwen2", **bf16)
    make_target(base / "gemma3", "gemma3", **bf16)
    make_target(base / "gemma4", "gemma4", wrapped=True, tie_word_embeddings=True, **bf16)
    make_target(base / "gemma4moe", "gemma4moe", tie_word_embeddings=True, **bf16)
    make_target(base / "gemma4e", "gemma4e", tie_word_embeddings=True, **bf16)
    make_target(base / "gemma4-unified", "gemma4", wrapped=True, unified=True, **bf16)
    forbidden = {"suppress_tokens": [7, 9]}
    (base / "gemma4-unified" / "generation_config.json").write_text(json.dumps(forbidden))
    smollm2_sizes = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    taps = {"target_layer_ids": [1, 14, 27], "mask_token_id": 4}
    make_drafter(
        base / "smollm2-dflash", base / "smollm2", dflash_config=taps, **smollm2_sizes, **bf16
    )
    make_drafter(base / "qwen35-dflash", base / "qwen35", **bf16)
    make_drafter(
        base / "gpt-oss-dflash",
        base / "gpt-oss",
        attention_bias=True,
        rope_parameters={**yarn, "factor": 32.0},
        **bf16,
    )
    make_drafter(
        base / "gemma4-dflash",
        base / "gemma4",
        use_sliding_window=True,
        sliding_window=2048,
        layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=30.0,
        **bf16,
    )
    make_drafter(
        base / "qwen35-sliding",
        base / "qwen35",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=0,
        layer_types=["sliding_attention", "full_attention"],
        **bf16,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with NAME.ours.gguf and NAME.theirs.gguf of every case."""
    base = tmp_path_factory.mktemp("both")
    make_folders(base)
    jobs = []
    for case in CASES:
        target = base / case.target if case.target else None
        conversion = prepare(
            base / case.folder, case.outtype, Options(target, mtp=case.mtp), case.pre
        )
        ours = base / f"{case.name}.ours.gguf"
        write_gguf(ours, conversion.metadata, conversion.plans, conversion.types)
        arguments = [str(base / case.folder), "--outtype", case.outtype]
        arguments += ["--outfile", str(base / f"{case.name}.theirs.gguf")]
        arguments += ["--target-model-dir", str(target)] if target else []
        arguments += [] if case.mtp else ["--no-mtp"]
        jobs.append(PeerJob(arguments, case.pre))
    run_peer_converter(jobs)
    return base


SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def value_end(data: bytes, at: int, kind: int) -> int:
    if kind == STRING:
        return at + 8 + int.from_bytes(data[at : at + 8], "little")
    if kind != ARRAY:
        return at + SCALAR_BYTES[kind]
    element, count = struct.unpack_from("<IQ", data, at)
    at += 12
    for _ in range(count):
        at = value_end(data, at, element)
    return at


def raw_metadata(path: Path) -> dict[bytes, bytes]:
    """Returns type and value bytes of each metadata key; gguf's own reader takes 10 s."""
    data, at, found = path.read_bytes(), 24, {}
    for _ in range(int.from_bytes(data[16:24], "little")):
        start = value_end(data, at, STRING)
        end = value_end(data, start + 4, int.from_bytes(data[start : start + 4], "little"))
        found[data[at + 8 : start]] = data[start:end]
        at = end
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_files_are_equal(files: Path, case: Case) -> None:
    ours, theirs = (files / f"{case.name}.{side}.gguf" for side in ("ours", "theirs"))
    assert raw_metadata(ours) == raw_metadata(theirs)
    found, expected = read_header(ours).tensors, read_header(theirs).tensors
    assert found.keys() == expected.keys()
    our_data, their_data = np.memmap(ours, mode="r"), np.memmap(theirs, mode="r")
    for name, wanted in expected.items():
        tensor = found[name]
        assert (tensor.type, tensor.shape) == (wanted.type, wanted.shape), name
        np.testing.assert_array_equal(
            our_data[tensor.start : tensor.start + tensor.n_bytes],
            their_data[wanted.start : wanted.start + wanted.n_bytes],
            err_msg=name,
        )
