"""How a model is loaded: the options of it, checked."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks import choice, flag, integer

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Names of K/V cache types, as llama.cpp spells them. Which pairs run is the device's matter."""

MAX_N_CTX = 1 << 30
MAX_LAYERS = 1 << 16
MAX_THREADS = 512
DEFAULT_N_CTX = 32768
"""Tokens of a context nobody asked for, if a model was trained for more."""


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How a model is placed in memory. Every value is checked; ValueError names what is wrong.

    n_ctx: positions the context holds; None is the model's training context, at most 32768 and,
        with `load`, what there is memory for.
    cache_type_k, cache_type_v: one of CACHE_TYPES.
    n_threads: CPU threads; None is one for each fast core, within a container's quota.
    device: name of the device for layers that are not on the CPU, as `devices()` lists it; None is
        the first GPU.
    n_gpu_layers: layers on that device, the last ones, the head included; None is all, 0 is none.
    n_cpu_moe: first layers whose experts stay on the CPU.
    backend_module: file of a ggml backend (libggml-cuda.so) to load first, for a ggml that was
        built without it.
    n_ubatch: prompt tokens computed at once.
    draft_window: positions before the present one that a drafter sees.
    repack: the CPU may rearrange weights for faster kernels, in memory of their own; without, they
        stay as they are in the file.
    """

    n_ctx: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    n_threads: int | None = None
    device: str | None = None
    n_gpu_layers: int | None = None
    n_cpu_moe: int = 0
    backend_module: str | None = None
    n_ubatch: int = 512
    draft_window: int = 4096
    repack: bool = True

    def __post_init__(self) -> None:
        if self.n_ctx is not None:
            _set(self, "n_ctx", integer("n_ctx", self.n_ctx, 1, MAX_N_CTX))
        for name in ("cache_type_k", "cache_type_v"):
            choice(name, getattr(self, name), CACHE_TYPES)
        if self.n_threads is not None:
            _set(self, "n_threads", integer("n_threads", self.n_threads, 1, MAX_THREADS))
        if self.n_gpu_layers is not None:
            _set(self, "n_gpu_layers", integer("n_gpu_layers", self.n_gpu_layers, 0, MAX_LAYERS))
        _set(self, "n_cpu_moe", integer("n_cpu_moe", self.n_cpu_moe, 0, MAX_LAYERS))
        _set(self, "n_ubatch", integer("n_ubatch", self.n_ubatch, 1, 1 << 16))
        _set(self, "draft_window", integer("draft_window", self.draft_window, 1, MAX_N_CTX))
        flag("repack", self.repack)


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)
