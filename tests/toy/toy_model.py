"""A random checkpoint of the made-up architecture, and its forward pass in NumPy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VOCAB_SIZE, write_tokenizer
from numpy.typing import NDArray
from safetensors.numpy import save_file
from toy_convert import slides

Array = NDArray[np.float64]

CONFIG: dict[str, Any] = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_head_dim": 16,
    "sliding_window": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "sliding_rope_theta": 1e4,
    "rope_factors": [1.0] * 6 + [3.0] * 4 + [1e30] * 6,
    "attention_scale": 0.5,
    "embedding_scale": 9.75,
    "logit_scale": 1.5,
    "softcap": 4.0,
    "eos_token_id": 382,
}


def make_toy(directory: Path) -> tuple[Path, dict[str, NDArray[np.float32]]]:
    random = np.random.default_rng(11)
    tensors: dict[str, NDArray[np.float32]] = {}

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        spread = 1 / math.sqrt(shape[-1]) if len(shape) > 1 else 0.2
        tensors[name] = (mean + spread * random.standard_normal(shape)).astype(np.float32)

    n, n_ff, heads, kv_heads = 96, 160, 4, 2
    add("model.embed_tokens.weight", VOCAB_SIZE, n)
    add("model.norm.weight", n, mean=1)
    for il in range(CONFIG["num_hidden_layers"]):
        d = CONFIG["sliding_head_dim" if slides(il) else "head_dim"]
        at = f"model.layers.{il}"
        for norm in ("input", "post_attention", "pre_mlp", "post_mlp"):
            add(f"{at}.{norm}_norm.weight", n, mean=1)
        add(f"{at}.scale", 1, mean=0.8)
        for norm in ("q", "k"):
            add(f"{at}.attention.{norm}_norm.weight", d, mean=1)
        add(f"{at}.attention.sinks", heads, mean=1)
        for part, size in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            if part != "v" or slides(il):
                add(f"{at}.attention.{part}.weight", size * d, n)
                add(f"{at}.attention.{part}.bias", size * d)
        add(f"{at}.attention.output.weight", n, heads * d)
        add(f"{at}.attention.output.bias", n)
        add(f"{at}.mlp.gate.weight", n_ff, n)
        add(f"{at}.mlp.up.weight", n_ff, n)
        add(f"{at}.mlp.down.weight", n, n_ff)
    write_tokenizer(directory, "llama-bpe")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return directory, tensors


def _rms(x: Array, weight: Any = 1.0) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _turn(x: Array, base: float, factors: Array) -> Array:
    """Applies rotary embeddings to x, [positions, heads, d], with the halves of d as pairs."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(half) / half) / factors
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attention(x: Array, w: dict[str, Array], il: int) -> Array:
    rows, heads, kv_heads = len(x), 4, 2
    d = CONFIG["sliding_head_dim" if slides(il) else "head_dim"]
    base = CONFIG["sliding_rope_theta" if slides(il) else "rope_theta"]
    factors = np.ones(d // 2) if slides(il) else np.array(CONFIG["rope_factors"])

    def project(part: str, n: int) -> Array:
        return (x @ w[f"{part}.weight"].T + w[f"{part}.bias"]).reshape(rows, n, d)

    q, k = project("q", heads), project("k", kv_heads)
    v = _rms(project("v", kv_heads) if slides(il) else k)
    q, k = (_turn(_rms(t, w[f"{n}_norm.weight"]), base, factors) for n, t in (("q", q), ("k", k)))
    k, v = np.repeat(k, heads // kv_heads, axis=1), np.repeat(v, heads // kv_heads, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) * CONFIG["attention_scale"]
    distance = np.arange(rows)[:, None] - np.arange(rows)[None, :]
    seen = (distance >= 0) & (distance < (CONFIG["sliding_window"] if slides(il) else rows))
    scores = np.where(seen, scores, -np.inf)
    most = np.maximum(scores.max(-1), w["sinks"][:, None])[..., None]
    weights = np.exp(scores - most)
    total = weights.sum(-1, keepdims=True) + np.exp(w["sinks"][:, None, None] - most)
    mixed = np.einsum("hij,jhd->ihd", weights / total, v).reshape(rows, heads * d)
    return mixed @ w["output.weight"].T + w["output.bias"]


def reference_logits(tensors: dict[str, NDArray[np.float32]], tokens: list[int]) -> Array:
    """Returns the logits after every token, [n, n_vocab]."""
    of = {name: values.astype(np.float64) for name, values in tensors.items()}
    x = of["model.embed_tokens.weight"][tokens] * CONFIG["embedding_scale"]
    for il in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{il}."
        w = {name.removeprefix(at): t for name, t in of.items() if name.startswith(at)}
        attention = {n.removeprefix("attention."): t for n, t in w.items()}
        y = _attention(_rms(x, w["input_norm.weight"]), attention, il)
        x = x + _rms(y, w["post_attention_norm.weight"])
        h = _rms(x, w["pre_mlp_norm.weight"])
        gate, up = h @ w["mlp.gate.weight"].T, h @ w["mlp.up.weight"].T
        x = x + _rms((_gelu(gate) * up) @ w["mlp.down.weight"].T, w["post_mlp_norm.weight"])
        x = x * w["scale"]
    logits = _rms(x, of["model.norm.weight"]) @ of["model.embed_tokens.weight"].T
    cap = CONFIG["softcap"]
    return np.asarray(cap * np.tanh(logits * CONFIG["logit_scale"] / cap))
