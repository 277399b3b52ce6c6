"""Loads the target of a training: a Hugging Face folder or a GGUF."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .gguf_tokenizer import read_tokenizer


def load_target(path: Path, device: str, folder: Path) -> tuple[Any, Any]:
    """Returns model and tokenizer, in float32 on a CPU and in bfloat16 on a GPU.

    folder: receives a GGUF's config and tokenizer. Raises ValueError or OSError for a bad target.
    """
    kind = torch.float32 if device == "cpu" else torch.bfloat16
    if path.suffix != ".gguf":
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        return model.to(device).eval(), AutoTokenizer.from_pretrained(path)
    tokenizer = read_tokenizer(path)
    try:
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=kind)
    except (ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path}: transformers cannot load it: {reason}") from None
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.to(device).eval(), tokenizer


def for_answers(target: Any) -> Any:
    """Returns the target, in bfloat16 if a CPU computes bfloat16 faster; answers may differ."""
    if target.device.type == "cpu" and torch.cpu._is_avx512_bf16_supported():
        return deepcopy(target).to(torch.bfloat16)
    return target
