"""Random models of transformers and of the DFlash reference package; the only torch import."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from checkpoints import KINDS, VOCAB_SIZE, text_config_of
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    Gemma4UnifiedTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Fills parameters with seeded random values that keep activations near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                value = torch.rand(parameter.shape, generator=generator) * 2.0
            elif "norm" in name and parameter.ndim == 1:
                # Zero-centred norms (1 + w) start at 0, other norms at 1.
                value = parameter + 0.2 * noise
            elif parameter.ndim == 1:
                value = 0.2 * noise
            elif name.endswith("embed_tokens.weight"):
                value = 0.5 * noise
            else:
                value = noise / math.sqrt(parameter.shape[-1])
            parameter.copy_(value)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(buffer.shape, generator=generator))


def _text_config(kind: str, overrides: dict[str, Any]) -> Any:
    shared: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": 382,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    dense = {"intermediate_size": 160}
    moe = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    hybrid = {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    if kind == "llama":
        return LlamaConfig(**{**shared, **dense, **overrides})
    if kind == "qwen2":
        sizes = {**shared, **dense, "hidden_size": 128, "num_key_value_heads": 1, **overrides}
        del sizes["head_dim"]
        return Qwen2Config(**sizes)
    if kind == "qwen3":
        return Qwen3Config(**{**shared, **dense, **overrides})
    if kind == "qwen3moe":
        return Qwen3MoeConfig(**{**shared, **dense, **moe, "norm_topk_prob": True, **overrides})
    if kind == "qwen35":
        return Qwen3_5TextConfig(**{**shared, **dense, **hybrid, **overrides})
    if kind == "qwen35moe":
        extra = {"shared_expert_intermediate_size": 32}
        return Qwen3_5MoeTextConfig(**{**shared, **moe, **hybrid, **extra, **overrides})
    if kind == "qwen3next":
        plain = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        own = {"shared_expert_intermediate_size": 32, "norm_topk_prob": True,
               "rope_parameters": plain}  # fmt: skip
        return Qwen3NextConfig(**{**shared, **dense, **moe, **hybrid, **own, **overrides})
    if kind == "gpt-oss":
        yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
                "beta_fast": 32.0, "beta_slow": 1.0,
                "original_max_position_embeddings": 64}  # fmt: skip
        own = {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 4,
               "num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": yarn}  # fmt: skip
        return GptOssConfig(**{**shared, **own, **overrides})
    if kind == "gemma3":
        # Published models are tied, but a random tied head would repeat one token.
        sliding = {"rope_type": "default", "rope_theta": 1e4}
        full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
        rope = {"sliding_attention": sliding, "full_attention": full}
        own = {**dense, "num_hidden_layers": 7, "sliding_window": 8, "query_pre_attn_scalar": 32,
               "rope_parameters": rope, "bos_token_id": 2, "eos_token_id": 1,
               "pad_token_id": 0}  # fmt: skip
        return Gemma3TextConfig(**{**shared, **own, **overrides})
    if kind.startswith("gemma4"):
        # Published models are tied, but a random tied head would repeat one token.
        own = {**dense, "num_hidden_layers": 4, "sliding_window": 8, "global_head_dim": 64,
               "num_global_key_value_heads": 1, "attention_k_eq_v": True,
               "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
               "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
               "vocab_size_per_layer_input": VOCAB_SIZE, "bos_token_id": 2, "eos_token_id": 1,
               "pad_token_id": 0}  # fmt: skip
        if kind == "gemma4moe":
            own |= {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
                    "moe_intermediate_size": 64}  # fmt: skip
        if kind == "gemma4e":
            own |= {"num_hidden_layers": 6, "hidden_size_per_layer_input": 16,
                    "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
                    "attention_k_eq_v": False, "num_global_key_value_heads": None,
                    "layer_types": ["sliding_attention", "full_attention"] * 3}  # fmt: skip
        unified = overrides.pop("unified", False)
        return (Gemma4UnifiedTextConfig if unified else Gemma4TextConfig)(
            **{**shared, **own, **overrides}
        )
    raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")


def _model(kind: str, text_config: Any, wrapped: bool) -> PreTrainedModel:
    if not wrapped:
        classes: dict[str, Any] = {
            "llama": LlamaForCausalLM,
            "qwen2": Qwen2ForCausalLM,
            "qwen3": Qwen3ForCausalLM,
            "qwen3moe": Qwen3MoeForCausalLM,
            "qwen35": Qwen3_5ForCausalLM,
            "qwen35moe": Qwen3_5MoeForCausalLM,
            "qwen3next": Qwen3NextForCausalLM,
            "gpt-oss": GptOssForCausalLM,
            "gemma3": Gemma3ForCausalLM,
            "gemma4": Gemma4ForCausalLM,
            "gemma4moe": Gemma4ForCausalLM,
            "gemma4e": Gemma4ForCausalLM,
        }
        model: PreTrainedModel = classes[kind](text_config)
        return model
    if kind.startswith("gemma4"):
        return _wrapped_gemma4(text_config)
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": text_config.hidden_size,
        "num_position_embeddings": 16,
    }
    arguments = {
        "text_config": text_config.to_dict(),
        "vision_config": vision,
        "tie_word_embeddings": text_config.tie_word_embeddings,
    }
    if kind == "qwen35":
        return Qwen3_5ForConditionalGeneration(Qwen3_5Config(**arguments))
    if kind == "qwen35moe":
        return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**arguments))
    raise ValueError(f"kind {kind!r} has no multimodal wrapper")


def _wrapped_gemma4(text_config: Any) -> PreTrainedModel:
    arguments: dict[str, Any] = {
        "text_config": text_config.to_dict(),
        "audio_config": None,
        "tie_word_embeddings": text_config.tie_word_embeddings,
    }
    if isinstance(text_config, Gemma4UnifiedTextConfig):
        arguments["vision_config"] = {
            "patch_size": 4,
            "mm_embed_dim": text_config.hidden_size,
            "mm_posemb_size": 4,
            "output_proj_dims": text_config.hidden_size,
        }
        return Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(**arguments))
    arguments["vision_config"] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "position_embedding_size": 16,
    }
    return Gemma4ForConditionalGeneration(Gemma4Config(**arguments))


def _name_what_is_unset(directory: Path) -> None:
    """Adds null fields of published Gemma configs, which llama.cpp's converter requires."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.get("text_config", config).setdefault("moe_intermediate_size", None)
    path.write_text(json.dumps(config), encoding="utf-8")


def _append_mtp(directory: Path, config: Any, seed: int, dtype: torch.dtype) -> None:
    """Adds the `mtp.*` tensors of a multi-token-prediction layer, which transformers ignores."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    full = next(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
    marker = f"layers.{full}."
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return (0.1 * torch.randn(shape, generator=generator)).to(dtype)

    for name in [name for name in tensors if marker in name and "visual" not in name]:
        suffix = name.split(marker, 1)[1]
        tensors[f"mtp.layers.0.{suffix}"] = noise(*tensors[name].shape)
    hidden = config.hidden_size
    tensors["mtp.fc.weight"] = noise(hidden, 2 * hidden)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = noise(hidden)
    save_file(tensors, path, metadata={"format": "pt"})


def _fuse_experts(directory: Path, n_experts: int) -> None:
    """Stacks expert weights as published Qwen3.5-MoE checkpoints do, with fused gate_up."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]:
        base = name.removesuffix(".0.gate_proj.weight")
        stacked = {
            part: torch.stack([tensors.pop(f"{base}.{i}.{part}.weight") for i in range(n_experts)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{base}.gate_up_proj"] = torch.cat([stacked["gate_proj"], stacked["up_proj"]], 1)
        tensors[f"{base}.down_proj"] = stacked["down_proj"]
    save_file(tensors, path, metadata={"format": "pt"})


def mxfp4_values(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Decodes MXFP4 blocks [..., n, 16] with exponents [..., n] to values [..., 32 * n].

    Source: transformers, integrations/mxfp4.py.
    """
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    values = magnitudes[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return (values * torch.exp2(exponents.float() - 127)[..., None]).flatten(-2)


def _pack_experts(directory: Path, seed: int) -> None:
    """Replaces the experts of a gpt-oss folder with random MXFP4 blocks, as published."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        n_experts, n_in, n_out = tensors.pop(name).shape
        shape = (n_experts, n_out, n_in // 32)
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
        )
        # Magnitudes reach 6, so exponents near -5 keep activations near 1.
        tensors[f"{name}_scales"] = torch.randint(
            120, 124, shape, generator=generator, dtype=torch.uint8
        )
    save_file(tensors, path, metadata={"format": "pt"})
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    path.write_text(json.dumps(config), encoding="utf-8")


def unpack_experts(directory: Path) -> Path:
    """Writes a gpt-oss folder with unpacked experts, for transformers."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_blocks")]:
        base = name.removesuffix("_blocks")
        values = mxfp4_values(tensors.pop(name), tensors.pop(f"{base}_scales"))
        tensors[base] = values.transpose(1, 2).contiguous()
    config = text_config_of(directory)
    del config["quantization_config"]
    plain = directory / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return plain


def write_target(
    directory: Path,
    kind: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "10GB",
    wrapped: bool = False,
    mtp: bool = False,
    fused_experts: bool = False,
    packed_experts: bool = False,
    **overrides: Any,
) -> None:
    """Writes config.json and the weights of a random target.

    wrapped: multimodal form with a tiny vision tower. mtp: adds a multi-token-prediction layer.
    fused_experts: experts as 3-D tensors. packed_experts: gpt-oss's as MXFP4, in one shard only.
    overrides: fields of the transformers text config.
    """
    stored = getattr(torch, dtype)
    text_config = _text_config(kind, overrides)
    if mtp:
        text_config.mtp_num_hidden_layers = 1
    model = _model(kind, text_config, wrapped)
    randomise(model, seed)
    model.to(stored).save_pretrained(directory, max_shard_size=max_shard_size)
    if mtp:
        _append_mtp(directory, text_config, seed + 1, stored)
    if fused_experts:
        _fuse_experts(directory, text_config.num_experts)
    if kind.startswith("gemma4"):
        _name_what_is_unset(directory)
    if packed_experts:
        _pack_experts(directory, seed + 2)


def write_drafter(
    directory: Path,
    target: dict[str, Any],
    *,
    seed: int = 100,
    dtype: str = "float32",
    dflash_config: dict[str, Any] | None = None,
    dflash2: bool = False,
    **overrides: Any,
) -> None:
    """Writes a random drafter for a target with this text config.

    dflash_config: updates of the nested DFlash settings. overrides: fields of the Qwen3 config.
    """
    n_target_layers = target["num_hidden_layers"]
    settings: dict[str, Any] = {
        "mask_token_id": target["vocab_size"] - 1,
        "target_layer_ids": sorted({0, max(0, n_target_layers - 2)}),
    }
    if dflash2:
        settings |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 8,
            "selector_top_k": 4,
        }
    arguments: dict[str, Any] = {
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_target_layers": n_target_layers,
        "block_size": 8,
        "bos_token_id": None,
        "eos_token_id": None,
        "dflash_config": settings | (dflash_config or {}),
    }
    config = Qwen3Config(**{**arguments, **overrides})
    model = (DFlash2DraftModel if dflash2 else DFlashDraftModel)(config)
    randomise(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
