"""A made-up kind of drafter needs one file and one table row on each side; compared with NumPy.

ctest runs this with toy_drafter.cpp, the core with that row; the test adds the converter's row.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import dflash_gguf.convert.arch as rows
import numpy as np
import pytest
import stepwise_convert
import torch
from numpy.typing import NDArray
from pairs import convert_drafter, make_pair
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

Array = NDArray[np.float64]

LIMIT = 1e-4  # largest error relative to the range of the logits; observed: 1e-6
N_TOKENS, N_DRAFT = 80, 4
HALF = N_TOKENS // 2
N_HEAD, N_HEAD_KV, HEAD_DIM, N_FF, EPS, BASE = 4, 2, 32, 112, 1e-6, 1e4


def make_head(directory: Path, target: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Writes a random drafter checkpoint for a target config; returns its tensors."""
    random = np.random.default_rng(17)
    n = target["hidden_size"]
    q, kv = N_HEAD * HEAD_DIM, N_HEAD_KV * HEAD_DIM
    shapes = {
        "fc": (n, 2 * n),
        "hidden_norm": (n,),
        "norm": (n,),
        "layer.input_norm": (n,),
        "layer.mlp_norm": (n,),
        "layer.self_attn.q_proj": (q, n),
        "layer.self_attn.k_proj": (kv, n),
        "layer.self_attn.v_proj": (kv, n),
        "layer.self_attn.o_proj": (n, q),
        "layer.mlp.gate_proj": (N_FF, n),
        "layer.mlp.up_proj": (N_FF, n),
        "layer.mlp.down_proj": (n, N_FF),
    }
    tensors = {
        f"{name}.weight": (
            (len(shape) == 1) + random.standard_normal(shape) / math.sqrt(shape[-1])
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    config = {
        "architectures": ["StepwiseForCausalLM"],
        "vocab_size": target["vocab_size"],
        "hidden_size": n,
        "intermediate_size": N_FF,
        "num_hidden_layers": 1,
        "num_attention_heads": N_HEAD,
        "num_key_value_heads": N_HEAD_KV,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "max_position_embeddings": 512,
        "rope_theta": BASE,
        "block_size": 8,
    }
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


def _rms(x: Array, weight: Any) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def _turn(x: Array) -> Array:
    """Applies rotary embeddings to x, [positions, heads, d], with the halves of d as pairs."""
    half = HEAD_DIM // 2
    angles = np.arange(len(x))[:, None] * BASE ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Head:
    def __init__(self, tensors: dict[str, NDArray[np.float32]]) -> None:
        self.w = {name.removesuffix(".weight"): x.astype(float) for name, x in tensors.items()}

    def __call__(self, embeddings: Array, hidden: Array) -> Array:
        """Takes embeddings of tokens and the hidden state before each, both [n, n_embd]."""
        w, n = self.w, len(embeddings)
        x = np.concatenate([embeddings, _rms(hidden, w["hidden_norm"])], axis=1) @ w["fc"].T
        normed = _rms(x, w["layer.input_norm"])
        q, k, v = (
            (normed @ w[f"layer.self_attn.{part}_proj"].T).reshape(n, -1, HEAD_DIM)
            for part in "qkv"
        )
        k, v = (np.repeat(part, N_HEAD // N_HEAD_KV, axis=1) for part in (_turn(k), v))
        scores = np.einsum("ihd,jhd->hij", _turn(q), k) / math.sqrt(HEAD_DIM)
        scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", probs / probs.sum(-1, keepdims=True), v)
        x += mixed.reshape(n, -1) @ w["layer.self_attn.o_proj"].T
        normed = _rms(x, w["layer.mlp_norm"])
        gate = normed @ w["layer.mlp.gate_proj"].T
        up = normed @ w["layer.mlp.up_proj"].T
        x += (gate / (1 + np.exp(-gate)) * up) @ w["layer.mlp.down_proj"].T
        return _rms(x, w["norm"])


def reference_draft(
    head: Head, target: Any, tokens: list[int], position: int, restored: int | None = None
) -> Array:
    """Returns the logits of N_DRAFT steps after tokens[position].

    restored: position of a restored prefix, whose last hidden state is unknown (zeros).
    """
    embeddings = target.get_input_embeddings().weight.numpy().astype(float)
    matrix = target.get_output_embeddings().weight.numpy().astype(float)
    states = target(torch.tensor([tokens[:position]]), output_hidden_states=True).hidden_states
    hidden = np.concatenate([np.zeros((1, embeddings.shape[1])), states[-1][0].numpy()])
    if restored is not None:
        hidden[restored] = 0
    text, logits = tokens[: position + 1], []
    for _ in range(N_DRAFT):
        left = head(embeddings[text], hidden)[-1]
        logits.append(matrix @ left)
        text = [*text, int(logits[-1].argmax())]
        hidden = np.concatenate([hidden, left[None]])
    return np.array(logits)


@pytest.mark.parametrize("kind", ["llama", "qwen35", "gemma4"])
def test_a_made_up_drafter(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows.Architecture(
        ("StepwiseForCausalLM",), stepwise_convert.metadata, stepwise_convert.tensors, True
    )
    monkeypatch.setattr(rows, "ARCHITECTURES", (*rows.ARCHITECTURES, row))
    pair = make_pair(tmp_path, kind)
    target = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=torch.float32).eval()
    torch.set_grad_enabled(False)
    tensors = make_head(tmp_path / "head", target.config.get_text_config().to_dict())
    head, out = tmp_path / "head.gguf", tmp_path / "logits"
    convert_drafter(tmp_path / "head", pair.target_dir, head, kind)
    tokens = np.random.default_rng(3).integers(0, 380, N_TOKENS).tolist()
    command = [os.environ["DFLASH_TOY_DRAFTER"], pair.target, pair.drafter, head, out]
    done = subprocess.run([*command, *map(str, tokens)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = np.fromfile(out, dtype=np.float32).reshape(3, N_DRAFT, -1)
    for draft, position, restored in zip(
        found, (HALF, HALF + 5, HALF + 3), (None, HALF, None), strict=True
    ):
        expected = reference_draft(Head(tensors), target, tokens, position, restored)
        np.testing.assert_allclose(draft, expected, atol=LIMIT * np.ptp(expected), rtol=0)
