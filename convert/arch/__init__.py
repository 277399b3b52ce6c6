"""Table of the architectures that the converter supports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..checkpoint import Checkpoint
from ..errors import ConvertError
from ..plan import Metadata, TensorPlan
from . import (
    dflash,
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    qwen2,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen35,
    qwen35moe,
)
from .common import Options

__all__ = ["ARCHITECTURES", "Architecture", "Options", "architecture_of"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Converter of some model classes. is_drafter: True if the target's tokenizer is used."""

    classes: tuple[str, ...]
    metadata: Callable[[Checkpoint, Options], Metadata]
    tensors: Callable[[Checkpoint, Options], list[TensorPlan]]
    is_drafter: bool = False


ARCHITECTURES = (
    Architecture(("LlamaForCausalLM",), llama.metadata, llama.tensors),
    Architecture(("Qwen2ForCausalLM",), qwen2.metadata, qwen2.tensors),
    Architecture(("Qwen3ForCausalLM",), qwen3.metadata, qwen3.tensors),
    Architecture(("Qwen3MoeForCausalLM",), qwen3moe.metadata, qwen3moe.tensors),
    Architecture(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"), qwen35.metadata, qwen35.tensors
    ),
    Architecture(
        ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"),
        qwen35moe.metadata,
        qwen35moe.tensors,
    ),
    Architecture(("Qwen3NextForCausalLM",), qwen3next.metadata, qwen3next.tensors),
    Architecture(("GptOssForCausalLM",), gpt_oss.metadata, gpt_oss.tensors),
    Architecture(
        ("Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"), gemma3.metadata, gemma3.tensors
    ),
    Architecture(
        (
            "Gemma4ForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Gemma4UnifiedForConditionalGeneration",
            "Gemma4UnifiedForCausalLM",
        ),
        gemma4.metadata,
        gemma4.tensors,
    ),
    Architecture(("DFlashDraftModel",), dflash.metadata, dflash.tensors, is_drafter=True),
)


def architecture_of(checkpoint: Checkpoint) -> Architecture:
    """Returns the architecture of a checkpoint's class. Raises ConvertError if unsupported."""
    name = checkpoint.config.architecture
    for architecture in ARCHITECTURES:
        if name in architecture.classes:
            return architecture
    for relative in ("DSpark", "DFlash2"):
        if relative in name:
            raise ConvertError(
                f"{checkpoint.config.path}: {name} is a {relative} drafter, only DFlash drafters "
                "can be run"
            )
    known = ", ".join(name for row in ARCHITECTURES for name in row.classes)
    raise ConvertError(
        f"{checkpoint.config.path}: architecture {name!r} is not supported (supported: {known})"
    )
