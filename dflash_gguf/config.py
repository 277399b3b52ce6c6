"""What a caller chooses: how a model is loaded, how text is drawn. Frozen and checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
"""Names of K/V cache types, as llama.cpp spells them. Which pairs run is the device's matter."""

DRAFT_KINDS = ("none", "chain", "tree", "auto")
"""How candidates are proposed: not at all, a chain of one length, a tree of one size, or whatever
pays for itself. Without a drafter "auto" is plain decoding."""
TREE_BUDGET = 23
"""Nodes of a tree unless told otherwise: with its root it fills a pass of 24 rows."""
MAX_TREE_BUDGET = 255
MAX_VERIFY_ROWS = MAX_TREE_BUDGET + 1
AUTO_TREE_BUDGET = 63
"""Nodes that "auto" tries at most unless told otherwise; a node of a 27B hybrid takes 3.5 MB."""

MAX_N_CTX = 1 << 30
MAX_DRAFT = 1 << 16
MAX_LAYERS = 1 << 16
MAX_THREADS = 512
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 64) - 1
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
            _set(self, "n_ctx", _integer("n_ctx", self.n_ctx, 1, MAX_N_CTX))
        for name in ("cache_type_k", "cache_type_v"):
            value = getattr(self, name)
            if value not in CACHE_TYPES:
                raise ValueError(f"{name} is {value!r}, must be one of {', '.join(CACHE_TYPES)}")
        if self.n_threads is not None:
            _set(self, "n_threads", _integer("n_threads", self.n_threads, 1, MAX_THREADS))
        if self.n_gpu_layers is not None:
            _set(self, "n_gpu_layers", _integer("n_gpu_layers", self.n_gpu_layers, 0, MAX_LAYERS))
        _set(self, "n_cpu_moe", _integer("n_cpu_moe", self.n_cpu_moe, 0, MAX_LAYERS))
        _set(self, "n_ubatch", _integer("n_ubatch", self.n_ubatch, 1, 1 << 16))
        _set(self, "draft_window", _integer("draft_window", self.draft_window, 1, MAX_N_CTX))
        _check_flag("repack", self.repack)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How one answer is drawn. Defaults are llama.cpp's, except temperature 0.0 (greedy).

    max_tokens: tokens drawn at most; None is until the context is full.
    temperature: 0 takes the best token after the penalties; top_k, top_p, min_p are then idle.
    top_k: tokens kept by rank; 0 or less keeps all.
    top_p: probability mass kept, 1 keeps all. min_p: least share of the best probability, 0 off.
    repeat_penalty (1 off), presence_penalty, frequency_penalty (0 off): applied to tokens among
        the last repeat_last_n tokens of prompt and answer.
    seed: any signed or unsigned 64-bit integer; None draws one, and the result reports it.
    stop: texts that end the answer; they are not part of it. One text or several.
    ignore_eos: tokens that end a generation are never drawn.
    draft: one of DRAFT_KINDS.
    draft_max: positions that a round drafts at most; None is what the drafter's block holds.
    draft_min: a round drafts so many candidates or none.
    tree_budget: candidates of a tree; with "auto" at most so many. None is 23, with "auto" 63.
    tree_spine: a tree holds the whole chain of best candidates before it branches.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int | None = None
    stop: str | Iterable[str] = ()
    ignore_eos: bool = False
    draft: str = "auto"
    draft_max: int | None = None
    draft_min: int = 0
    tree_budget: int | None = None
    tree_spine: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _set(self, "max_tokens", _integer("max_tokens", self.max_tokens, 0, MAX_N_CTX))
        _set(self, "temperature", _number("temperature", self.temperature, 0.0, math.inf))
        _set(self, "top_k", _integer("top_k", self.top_k, -(1 << 31), (1 << 31) - 1))
        _set(self, "top_p", _number("top_p", self.top_p, 0.0, 1.0))
        _set(self, "min_p", _number("min_p", self.min_p, 0.0, 1.0))
        _set(self, "repeat_penalty", _number("repeat_penalty", self.repeat_penalty, 0.0, math.inf))
        if self.repeat_penalty == 0.0:
            raise ValueError("repeat_penalty is 0, must be greater than 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _set(self, name, _number(name, getattr(self, name), -math.inf, math.inf))
        _set(self, "repeat_last_n", _integer("repeat_last_n", self.repeat_last_n, 0, MAX_N_CTX))
        if self.seed is not None:
            _set(self, "seed", _integer("seed", self.seed, SEED_MIN, SEED_MAX))
        _set(self, "stop", _stop_texts(self.stop))
        for name in ("ignore_eos", "tree_spine"):
            _check_flag(name, getattr(self, name))
        if self.draft not in DRAFT_KINDS:
            raise ValueError(f"draft is {self.draft!r}, must be one of {', '.join(DRAFT_KINDS)}")
        _set(self, "draft_min", _integer("draft_min", self.draft_min, 0, MAX_DRAFT))
        if self.draft_max is not None:
            _set(self, "draft_max", _integer("draft_max", self.draft_max, 1, MAX_DRAFT))
            if self.draft_min > self.draft_max:
                raise ValueError(
                    f"draft_min is {self.draft_min}, must be at most draft_max, {self.draft_max}"
                )

        if self.tree_budget is not None:
            _set(self, "tree_budget", _integer("tree_budget", self.tree_budget, 1, MAX_TREE_BUDGET))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, whatever form they were given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens already seen change the logits."""
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, must be True or False")


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, must be an integer")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} is {value!r}, must be an integer") from None
    if number < low:
        raise ValueError(f"{name} is {number}, must be at least {low}")
    if number > high:
        raise ValueError(f"{name} is {number}, must be at most {high}")
    return number


def _number(name: str, value: object, low: float, high: float) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise ValueError(f"{name} is {value!r}, must be a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, must be a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, must be finite")
    if number < low:
        raise ValueError(f"{name} is {number:g}, must be at least {low:g}")
    if number > high:
        raise ValueError(f"{name} is {number:g}, must be at most {high:g}")
    return number


def _stop_texts(stop: object) -> tuple[str, ...]:
    if isinstance(stop, str):
        texts: tuple[object, ...] = (stop,)
    elif isinstance(stop, Iterable):
        texts = tuple(stop)
    else:
        raise ValueError(f"stop is {stop!r}, must be a text or several texts")
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"stop holds {text!r}, must hold texts only")
        if not text:
            raise ValueError("stop holds an empty text, which would end every answer at once")
    return tuple(str(text) for text in texts)
