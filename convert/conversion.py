"""Plans a conversion: metadata, tensors and types of a GGUF file, before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from . import types
from .arch import Options, architecture_of
from .arch.common import IGNORED
from .checkpoint import Checkpoint
from .errors import ConvertError
from .general import general_metadata
from .gguf_target import copy_tokenizer
from .plan import Metadata, TensorPlan, list_plan
from .schema import Key, Tensor
from .tokenizer import END_KEYS, add_tokenizer

OUTTYPES = (
    "f32",
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q4_k_m",
    "q5_k_m",
    "q6_k",
    "auto",
)
MIN_DRAFT_VOCAB = 256
"""Fewest tokens of --draft-vocab, which hold all bytes in most vocabularies; as at a load."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Planned GGUF file: its metadata, its tensors, and their ggml types by tensor name."""

    checkpoint: Checkpoint
    outtype: str
    metadata: Metadata
    plans: list[TensorPlan]
    types: Mapping[str, str]


def prepare(
    model_dir: Path, outtype: str, options: Options | None = None, pre: str | None = None
) -> Conversion:
    """Plans a model folder's conversion. pre: name of the pre-tokenizer, None to detect it."""
    options = options or Options()
    checkpoint = Checkpoint(model_dir)
    architecture = architecture_of(checkpoint)
    model = architecture.metadata(checkpoint, options)
    plans = plans_of(checkpoint, options)
    if outtype == "auto":
        outtype = stored_type(checkpoint)
    # A file with MXFP4 tensors gets the file type of MXFP4, whatever its other tensors are.
    has_blocks = any(plan.packed is not None and plan.packed.type == "mxfp4" for plan in plans)
    file_type = types.FILE_TYPES["mxfp4_moe" if has_blocks else outtype]
    general = general_metadata(model_dir, model.arch, plans, file_type)
    tokenizer = Metadata(model.arch)
    tokenizer_dir = options.target_model_dir if architecture.is_drafter else model_dir
    vocab_size = checkpoint.config.integer("vocab_size")
    if tokenizer_dir is not None and tokenizer_dir.is_file():
        copy_tokenizer(tokenizer, tokenizer_dir)
    else:
        add_tokenizer(tokenizer, tokenizer_dir or model_dir, vocab_size, pre)
    # The model's keys come last, so that a drafter's mask token replaces the target's.
    metadata = Metadata(model.arch)
    for part in (general, tokenizer, model):
        metadata.values.update(part.values)
        metadata.notes += part.notes
    if options.draft_vocab is not None:
        if not _count(model, Key.NEXTN_PREDICT_LAYERS):
            raise ConvertError(f"{model_dir}: has no MTP layer, which --draft-vocab needs")
        if not MIN_DRAFT_VOCAB <= options.draft_vocab < vocab_size:
            raise ConvertError(
                f"--draft-vocab is {options.draft_vocab}, give {MIN_DRAFT_VOCAB} to "
                f"{vocab_size - 1} tokens"
            )
        ends = [metadata.values[key][1] for key in END_KEYS if key in metadata.values]
        tokens = np.union1d(np.arange(options.draft_vocab), np.array(ends, np.int64))
        plans = with_shortlist(plans, tokens, has_trunk=not options.only_mtp)
    chosen = types.choose_types(
        plans, outtype, model.arch, _count(model, Key.BLOCK_COUNT), _count(model, Key.EXPERT_COUNT)
    )
    return Conversion(checkpoint, outtype, metadata, plans, chosen)


def plans_of(checkpoint: Checkpoint, options: Options) -> list[TensorPlan]:
    """Returns plans of the tensors that the options ask for; ConvertError if there are none."""
    architecture = architecture_of(checkpoint)
    plans = architecture.tensors(checkpoint, options)
    if not options.only_mtp:
        return plans
    metadata = architecture.metadata(checkpoint, options)
    n_mtp = _count(metadata, Key.NEXTN_PREDICT_LAYERS)
    if not n_mtp:
        raise ConvertError(f"{checkpoint.directory}: has no MTP layer, which --mtp needs")
    n_trunk = _count(metadata, Key.BLOCK_COUNT) - n_mtp
    trunk = tuple(f"blk.{block}." for block in range(n_trunk))
    return [plan for plan in plans if not plan.name.startswith(trunk)]


def with_shortlist(
    plans: list[TensorPlan], tokens: NDArray[np.int64], *, has_trunk: bool
) -> list[TensorPlan]:
    """Returns plans of a file whose MTP layer drafts only some tokens.

    Without the trunk, the file needs only the head's rows of these tokens, and no embeddings.
    """
    listed = list_plan(Tensor.D2T, tokens)
    if has_trunk:
        return [*plans, listed]
    tables = {plan.name: plan for plan in plans if plan.name in (Tensor.OUTPUT, Tensor.TOKEN_EMBD)}
    head = tables.get(Tensor.OUTPUT) or tables[Tensor.TOKEN_EMBD]
    shape = (len(tokens), head.n_columns)
    others = [plan for plan in plans if plan.name not in tables]
    return [*others, replace(head, name=Tensor.OUTPUT, shape=shape, rows=tokens), listed]


def _count(metadata: Metadata, key: str) -> int:
    _, value = metadata.values.get(key.format(arch=metadata.arch), ("uint32", 0))
    return int(value)


def stored_type(checkpoint: Checkpoint) -> str:
    """Returns the type of the checkpoint's first 16-bit matrix, "bf16" or "f16"; else "f16"."""
    for name in checkpoint.names:
        if len(checkpoint.shape(name)) >= 2 and IGNORED.search(name) is None:
            dtype = checkpoint.dtype(name)
            if dtype in ("BF16", "F16"):
                return dtype.lower()
    return "f16"
