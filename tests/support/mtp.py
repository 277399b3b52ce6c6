"""The MTP layer of Qwen3.5 and its relatives in NumPy, float64, from a checkpoint's tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

Array = NDArray[np.float64]


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class MtpLayer:
    """Teacher-forced forward pass over all rows of one sequence."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.config = config.get("text_config", config)
        found = load_file(directory / "model.safetensors")
        self.w = {
            name.removeprefix("mtp.").removesuffix(".weight"): x.astype(np.float64)
            for name, x in found.items()
            if name.startswith("mtp.")
        }

    def norm(self, name: str, x: Array) -> Array:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return np.asarray(x / scale * (1 + self.w[name]))

    def rope(self, x: Array, positions: NDArray[np.int64]) -> Array:
        """Rotates the first part of each head of x, [rows, heads, head_dim]."""
        rope = self.config["rope_parameters"]
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        angles = positions[:, None] * float(rope["rope_theta"]) ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], axis=-1)

    def __call__(self, embeddings: Array, hidden: Array, visible: NDArray[np.bool_]) -> Array:
        """Returns the final hidden states, [n, n_embd].

        embeddings: of the rows' tokens. hidden: state before each row. visible: [n, n], True where
        a row attends to another; a row's position is the number of rows that it attends to, less 1.
        """
        layer, config, n = "layers.0", self.config, len(embeddings)
        heads, d = config["num_attention_heads"], config["head_dim"]
        positions = visible.sum(axis=1) - 1
        both = [
            self.norm("pre_fc_norm_embedding", embeddings),
            self.norm("pre_fc_norm_hidden", hidden),
        ]
        x = np.concatenate(both, axis=1) @ self.w["fc"].T
        normed = self.norm(f"{layer}.input_layernorm", x)
        q, k, v = (normed @ self.w[f"{layer}.self_attn.{part}_proj"].T for part in "qkv")
        q, gate = np.split(q.reshape(n, heads, 2 * d), 2, axis=2)
        q = self.rope(self.norm(f"{layer}.self_attn.q_norm", q), positions)
        k = self.rope(self.norm(f"{layer}.self_attn.k_norm", k.reshape(n, -1, d)), positions)
        k, v = (np.repeat(part.reshape(n, -1, d), heads // (part.size // n // d), axis=1)
                for part in (k, v))  # fmt: skip
        scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        scores = np.where(visible, scores, -np.inf)
        probs = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", probs / probs.sum(-1, keepdims=True), v)
        mixed = (mixed * _sigmoid(gate)).reshape(n, -1)
        x = x + mixed @ self.w[f"{layer}.self_attn.o_proj"].T
        normed = self.norm(f"{layer}.post_attention_layernorm", x)
        return self.norm("norm", x + self._feed_forward(f"{layer}.mlp", normed))

    def _dense(self, name: str, x: Array) -> Array:
        gate, up = (x @ self.w[f"{name}.{part}_proj"].T for part in ("gate", "up"))
        return np.asarray((_silu(gate) * up) @ self.w[f"{name}.down_proj"].T)

    def _feed_forward(self, name: str, x: Array) -> Array:
        if f"{name}.gate" not in self.w:
            return self._dense(name, x)
        logits = x @ self.w[f"{name}.gate"].T
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        chosen = np.argsort(-probs, axis=1)[:, : self.config["num_experts_per_tok"]]
        y = _sigmoid(x @ self.w[f"{name}.shared_expert_gate"].T)
        y = y * self._dense(f"{name}.shared_expert", x)
        for row, experts in enumerate(chosen):
            weights = probs[row, experts] / probs[row, experts].sum()
            for expert, weight in zip(experts.tolist(), weights, strict=True):
                y[row] += weight * self._expert(name, expert, x[row])
        return np.asarray(y)

    def _expert(self, name: str, expert: int, x: Array) -> Array:
        fused = self.w.get(f"{name}.experts.gate_up_proj")
        if fused is None:
            return self._dense(f"{name}.experts.{expert}", x)
        gate, up = np.split(fused[expert] @ x, 2)
        down = self.w[f"{name}.experts.down_proj"][expert]
        return np.asarray(down @ (_silu(gate) * up))


class MtpReference:
    """Drafts of an MTP layer after any position of a token list, of which transformers runs all."""

    @torch.no_grad()
    def __init__(self, directory: Path, tokens: list[int]) -> None:
        target: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokens, self.layer = tokens, MtpLayer(directory)
        self.embeddings: Array = target.get_input_embeddings().weight.numpy().astype(np.float64)
        self.head: Array = target.get_output_embeddings().weight.numpy().astype(np.float64)
        self.output_norm: Array = target.get_decoder().norm.weight.numpy().astype(np.float64)
        found = target(torch.tensor([tokens]), output_hidden_states=True)
        self.hidden: Array = found.hidden_states[-1][0].numpy().astype(np.float64)

    def logits_of_path(
        self,
        position: int,
        path: list[int],
        window: int | None = None,
        unknown: Collection[int] = (),
    ) -> Array:
        """Returns the logits after each token of a path that begins at `position`, [n, n_vocab].

        window: number of rows before the path that it attends to. unknown: positions whose rows
        have zeros in place of the hidden state before them, as position 0 has.
        """
        before = self.tokens[:position]
        zeros = np.zeros(self.head.shape[1])
        hidden = [zeros, *self.hidden[:position]][: position + 1]
        hidden = [zeros if i in unknown else x for i, x in enumerate(hidden)]
        first = max(0, position - window) if window is not None else 0
        logits = []
        for n in range(1, len(path) + 1):
            text = [*before, *path[:n]]
            visible = np.tri(len(text), dtype=bool)
            left = self._run(text, np.array(hidden), visible, first)[-1]
            logits.append(self.head @ left)
            hidden.append(left)
        return np.array(logits)

    def _run(self, text: list[int], hidden: Array, visible: NDArray[np.bool_], first: int) -> Array:
        # Attention depends on differences of positions alone, so the rows before the window can be
        # left out.
        part = visible[first:, first:]
        return self.layer(self.embeddings[text[first:]], hidden[first:], part)

    def logits(self, position: int, n_draft: int, last_token: int, **rows: Any) -> Array:
        """Returns the logits of a greedy chain after last_token at `position`."""
        path = [last_token]
        for _ in range(n_draft - 1):
            path.append(int(self.logits_of_path(position, path, **rows)[-1].argmax()))
        return self.logits_of_path(position, path, **rows)
