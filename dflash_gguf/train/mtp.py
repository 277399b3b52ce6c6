"""The MTP layer of a GGUF target in training, and its GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

from .target import read_embeddings, read_head

N_STEPS = 3
"""Steps of a chain that are trained together."""
QUANTIZED = gguf.GGMLQuantizationType.Q8_0
NAMES = {
    "mtp_block.input_layernorm": "attn_norm",
    "mtp_block.post_attention_layernorm": "post_attention_norm",
    "mtp_block.self_attn.q_norm": "attn_q_norm",
    "mtp_block.self_attn.k_norm": "attn_k_norm",
    "mtp_block.self_attn.q_proj": "attn_q",
    "mtp_block.self_attn.k_proj": "attn_k",
    "mtp_block.self_attn.v_proj": "attn_v",
    "mtp_block.self_attn.o_proj": "attn_output",
    "mtp_block.mlp.gate_proj": "ffn_gate",
    "mtp_block.mlp.up_proj": "ffn_up",
    "mtp_block.mlp.down_proj": "ffn_down",
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "post_norm": "nextn.shared_head_norm",
}
"""Names of a GGUF block's tensors for the parameters of transformers' MtpLayer."""


def forward(model: MtpModel, embeddings: Tensor, hidden: Tensor) -> Tensor:
    """Returns the layer's final hidden states, [sequences, n, n_embd].

    embeddings: of the rows' tokens. hidden: the final hidden state before each row.
    """
    positions = torch.arange(embeddings.shape[1])[None]
    masks = model.create_masks_for_mtp_layer(0, embeddings, DynamicCache(), positions)
    left: Tensor = model.layers[0](
        embeddings,
        hidden,
        position_embeddings=model.rotary_emb(embeddings, position_ids=positions),
        position_ids=positions,
        past_key_values=None,
        **masks,
    )
    return left


def chain_losses(
    model: MtpModel,
    embeddings: Tensor,
    hidden: Tensor,
    loss: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Returns the sum of the losses of the chain's steps.

    Row p of step s, from 1, reads the embedding of token p + s, and hidden state p of the target
    (s = 1) or of step s - 1. loss: takes a step and its final hidden states, whose row p predicts
    token p + s + 1.
    """
    n, left, total = embeddings.shape[1], hidden, torch.tensor(0.0)
    for step in range(1, N_STEPS + 1):
        left = forward(model, embeddings[:, step:], left[:, : n - step])
        total = total + loss(step, left)
    return total


class GgufTarget:
    """A GGUF file of architecture qwen35 without an MTP layer; ValueError for any other file."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        if self.value("general.architecture") != "qwen35" or self.key("nextn_predict_layers", 0):
            raise ValueError(f"{path}: must be a qwen35 file without an MTP layer")
        if self.value("split.count", 1) > 1:
            raise ValueError(f"{path}: is one of several parts; an MTP layer needs a single file")
        self.embeddings, self.head = read_embeddings(path), read_head(path)

    def value(self, name: str, default: Any = None) -> Any:
        """Returns the value of a metadata key."""
        field = self.reader.fields.get(name)
        return default if field is None else field.contents()

    def key(self, name: str, default: Any = None) -> Any:
        """Returns the value of a metadata key of the architecture."""
        return self.value(f"qwen35.{name}", default)

    def new_layer(self, seed: int) -> MtpModel:
        """Returns a model with a random MTP layer of the sizes of the target's attention layers."""
        n_head, n_embd = self.key("attention.head_count"), self.key("embedding_length")
        head_dim = self.key("attention.key_length", n_embd // n_head)
        config = Qwen3_5TextConfig(
            vocab_size=len(self.embeddings),
            hidden_size=n_embd,
            intermediate_size=self.key("feed_forward_length"),
            num_hidden_layers=1,
            layer_types=["full_attention"],
            num_attention_heads=n_head,
            num_key_value_heads=self.key("attention.head_count_kv"),
            head_dim=head_dim,
            rms_norm_eps=self.key("attention.layer_norm_rms_epsilon"),
            rope_parameters={
                "rope_type": "default",
                "rope_theta": self.key("rope.freq_base"),
                "partial_rotary_factor": self.key("rope.dimension_count") / head_dim,
                "mrope_section": self.key("rope.dimension_sections")[:3],
                "mrope_interleaved": True,
            },
        )
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        torch.manual_seed(seed)
        return MtpModel(Qwen3_5ForCausalLM(config), 1)

    def write(
        self, path: Path, layer: torch.nn.Module, drafted: list[int], *, is_alone: bool
    ) -> None:
        """Writes a GGUF with the target's tensors unchanged and the layer as last block, in Q8_0.

        is_alone: True to omit the target's blocks, as convert-hf-to-gguf --mtp does; such a file is
        a drafter. drafted: tokens that the layer drafts beside the end tokens; empty: all.
        """
        n_trunk, recurrent = self.key("block_count"), self.key("attention.recurrent_layers", [])
        changed = {
            "qwen35.block_count": n_trunk + 1,
            "qwen35.attention.recurrent_layers": [*recurrent, False],
        }
        writer = gguf.GGUFWriter(path, "qwen35")
        for name, field in self.reader.fields.items():
            if not name.startswith(("GGUF.", "general.architecture")):
                value = changed.get(name, field.contents())
                element = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(name, value, field.types[0], element)
        writer.add_nextn_predict_layers(1)
        for tensor in self.reader.tensors:
            if not (is_alone and tensor.name.startswith("blk.")):
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        for name, parameter in layer.state_dict().items():
            module = name.removesuffix(".weight")
            data: NDArray[Any] = parameter.float().numpy()
            kind = QUANTIZED if data.ndim == 2 else gguf.GGMLQuantizationType.F32
            # transformers keeps a norm's factor less 1.
            data = gguf.quants.quantize(data + 1 if data.ndim == 1 else data, kind)
            writer.add_tensor(f"blk.{n_trunk}.{NAMES[module]}.weight", data, raw_dtype=kind)
        if drafted:
            ends = (self.value(f"tokenizer.ggml.{x}_token_id") for x in ("eos", "eot", "eom"))
            tokens = sorted({*drafted, *(end for end in ends if end is not None)})
            i64 = gguf.GGMLQuantizationType.I64
            writer.add_tensor("d2t", np.array(tokens, dtype=np.int64), raw_dtype=i64)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
