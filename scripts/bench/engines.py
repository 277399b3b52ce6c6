"""Drives our engine and llama.cpp's library in one process, to compare speed and logits.

Both use the same ggml, the same number of threads, and flash attention. A call of our engine
includes Python's checks and an argmax.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import llama_cpp
import numpy as np
from build_peer import can_repack
from numpy.typing import NDArray

from dflash_gguf import native
from dflash_gguf.config import LoadConfig

N_UBATCH = 512
FLASH_ATTENTION_ON = 1  # Value of LLAMA_FLASH_ATTN_TYPE_ENABLED in llama.h.
LOG_LEVEL_ERROR = 4  # Value of GGML_LOG_LEVEL_ERROR in ggml.h.

Tokens = NDArray[np.int32]
Logits = NDArray[np.float32]


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _print_errors(level: int, text: bytes, _data: object) -> None:
    if level == LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


llama_cpp.llama_log_set(_print_errors, ctypes.c_void_p(0))


class Engine(Protocol):
    """One sequence of a loaded model; calls return when the last token's logits can be read."""

    def reset(self) -> None: ...
    def prefill(self, tokens: Tokens) -> None: ...
    def decode(self, token: int) -> None: ...
    def close(self) -> None: ...

    def rows(self, tokens: Sequence[int], last: int) -> Logits:
        """Computes tokens in an empty sequence; returns the last tokens' logits [last, n_vocab]."""

    def next(self, token: int) -> Logits:
        """Appends a token and returns its logits, float32 [n_vocab]."""


class Ours:
    """One sequence of a model in this project's engine."""

    def __init__(self, path: Path, config: LoadConfig) -> None:
        self.model = native.Model(str(path), config)
        self.sequence = native.Sequence(native.Engine(self.model))

    def reset(self) -> None:
        self.sequence.reset()

    def prefill(self, tokens: Tokens) -> None:
        self.sequence.prefill(tokens).argmax()

    def decode(self, token: int) -> None:
        self.sequence.decode(token).argmax()

    def rows(self, tokens: Sequence[int], last: int) -> Logits:
        self.sequence.reset()
        if len(tokens) > last:
            self.sequence.prefill(tokens[:-last])
        return self.sequence.logits(tokens[-last:])

    def next(self, token: int) -> Logits:
        return self.sequence.decode(token).logits()

    def close(self) -> None:
        self.sequence.close()
        self.sequence.engine.close()
        self.model.close()


class Theirs:
    """llama.cpp's model and context, driven by the C functions of its library."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_threads: int,
        *,
        n_ubatch: int = N_UBATCH,
        n_gpu_layers: int = 0,
        n_sequences: int = 1,
        cache_types: tuple[str, str] = ("f16", "f16"),
        repack: bool = True,
    ) -> None:
        """n_gpu_layers: -1 for all. repack: rearrange quantised weights, unless the CPU has AMX."""
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = n_gpu_layers
        model_params.use_extra_bufts = repack and can_repack()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise native.Error(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        params.n_ubatch, params.n_seq_max = n_ubatch, n_sequences
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k, params.type_v = (
            getattr(llama_cpp, f"GGML_TYPE_{name.upper()}") for name in cache_types
        )
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise native.Error(f"{path}: llama.cpp cannot make a context with K/V of {cache_types}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(vocabulary))
        self._batch = llama_cpp.llama_batch_init(n_ctx, 0, 1)
        self._position = 0

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)
        self._position = 0

    def prefill(self, tokens: Tokens) -> None:
        self._append((ctypes.c_int32 * len(tokens))(*tokens.tolist()), len(tokens))

    def decode(self, token: int) -> None:
        self._append((ctypes.c_int32 * 1)(token), 1)

    def rows(self, tokens: Sequence[int], last: int) -> Logits:
        self.reset()
        if len(tokens) > last:
            self.prefill(np.array(tokens[:-last], np.int32))
        return self._rows(tokens[-last:])

    def next(self, token: int) -> Logits:
        return self._rows([token])[0]

    def batch(self, rows: Sequence[tuple[int, int, int]], wanted: Sequence[bool]) -> None:
        """Computes (token, position, sequence) rows. wanted[i]: True if row i needs logits."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted[i]
        if (status := llama_cpp.llama_decode(self.context, batch)) != 0:
            raise native.Error(f"llama_decode of {len(rows)} tokens returned {status}")

    def argmax(self, row: int) -> int:
        """Returns the most probable token after a row of the last batch."""
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self.n_vocab,)).argmax())

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def _append(self, tokens: Any, n: int) -> None:
        # llama_batch_get_one requests logits of the last token only.
        status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, n))
        if status != 0:
            raise native.Error(f"llama_decode of {n} tokens returned {status}")
        llama_cpp.llama_synchronize(self.context)
        self._position += n

    def _rows(self, tokens: Sequence[int]) -> Logits:
        n = len(tokens)
        self.batch([(t, self._position + i, 0) for i, t in enumerate(tokens)], [True] * n)
        self._position += n
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (n, self.n_vocab)).copy()
