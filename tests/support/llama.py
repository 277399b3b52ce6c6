"""llama.cpp's results for tests, through the low-level interface of llama_cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

_log: list[str] = []


@llama_cpp.llama_log_callback
def _collect(_level: int, text: bytes, _data: ctypes.c_void_p) -> None:
    _log.append(text.decode("utf-8", "replace"))


llama_cpp.llama_log_set(_collect, ctypes.c_void_p(0))


@contextmanager
def llama_model(path: Path, *, vocab_only: bool = False) -> Iterator[Any]:
    """Loads a model with weights in plain CPU buffers, whose kernels run on any machine."""
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False
    params.n_gpu_layers = 0
    params.vocab_only = vocab_only
    _log.clear()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp refuses {path}: {''.join(_log[-5:])}")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def llama_logits(
    path: Path, tokens: Sequence[int], cache_type: str | None = None, n_last: int | None = None
) -> NDArray[np.float32]:
    """Returns logits at all or the n_last last positions, float32 [n, n_vocab].

    Without cache_type K and V are float32, and flash attention is off, as its CPU kernel would
    round them to float16. With a cache_type ("q4_0") flash attention is on.
    """
    with llama_model(path) as model:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(256, len(tokens))
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = (
            llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
            if cache_type is None
            else llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        )
        name = f"GGML_TYPE_{(cache_type or 'f32').upper()}"
        params.type_k = params.type_v = getattr(llama_cpp, name)
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise RuntimeError(f"no context for {path}: {''.join(_log[-5:])}")
        try:
            return _decode(model, context, tokens, n_last or len(tokens))
        finally:
            llama_cpp.llama_free(context)


def _decode(model: Any, context: Any, tokens: Sequence[int], n_last: int) -> NDArray[np.float32]:
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
    try:
        for position, token in enumerate(tokens):
            batch.token[position] = token
            batch.pos[position] = position
            batch.n_seq_id[position] = 1
            batch.seq_id[position][0] = 0
            batch.logits[position] = position >= len(tokens) - n_last
        batch.n_tokens = len(tokens)
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        rows = [
            np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (n_vocab,)).copy()
            for i in range(len(tokens) - n_last, len(tokens))
        ]
    finally:
        llama_cpp.llama_batch_free(batch)
    return np.stack(rows)


def llama_tokenize(model: Any, text: str, *, special: bool) -> list[int]:
    """Returns token ids without BOS; `special` parses special tokens in the text."""
    vocab = llama_cpp.llama_model_get_vocab(model)
    raw = text.encode()
    ids = (llama_cpp.llama_token * (len(raw) + 8))()
    n = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, len(ids), False, special)
    if n < 0:
        raise RuntimeError(f"{text!r} needs {-n} tokens")
    return list(ids[:n])
