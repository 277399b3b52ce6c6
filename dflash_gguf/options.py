"""Names and types of settings that are given by name, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict


class LoadOptions(TypedDict, total=False):
    """The fields of a LoadConfig."""

    n_ctx: int | None
    cache_type_k: str
    cache_type_v: str
    n_threads: int | None
    device: str | None
    n_gpu_layers: int | None
    n_cpu_moe: int
    backend_module: str | None
    n_parallel: int
    n_ubatch: int
    cache_ram: int | None
    mtp: bool
    draft_vocab: int | None
    draft_gpu_layers: int | None
    draft_window: int
    draft_embedding_scale: str
    draft_tap_shift: int
    draft_attention: str
    draft_unwindowed: bool
    repack: bool


class DecodeOptions(TypedDict, total=False):
    """The fields of a DecodeConfig."""

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    seed: int | None
    stop: str | Iterable[str]
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    n_probs: int | None
    post_sampling_probs: bool
    prompt_logprobs: bool
    reasoning_format: str
    response_format: Mapping[str, Any] | None
    json_schema: Mapping[str, Any] | bool | str | None
    grammar: str | None
    regex: str | None
    cache_prompt: bool
    draft: str
    draft_type: str | Iterable[str] | None
    draft_max: int | None
    draft_min: int
    tree_budget: int | None
    tree_main_chain: bool
