"""What a caller chooses: how a model is loaded, how text is drawn. Frozen and checked."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._validate import choice, flag, integer, number
from .native import CACHE_TYPES, DEFAULT_N_CTX, MAX_LAYERS, MAX_N_CTX, MAX_VERIFY, LoadConfig

__all__ = [
    "AUTO_TREE_BUDGET",
    "CACHE_TYPES",
    "DEFAULT_N_CTX",
    "DRAFT_KINDS",
    "DRAFT_TYPES",
    "MAX_DRAFT",
    "MAX_LAYERS",
    "MAX_N_CTX",
    "MAX_TREE_BUDGET",
    "REASONING_FORMATS",
    "RETIRED_DRAFT_TYPES",
    "RETIRED_FIELDS",
    "SEED_MAX",
    "SEED_MIN",
    "TREE_BUDGET",
    "DecodeConfig",
    "LoadConfig",
]

DRAFT_TYPES = ("dflash", "suffix")
"""Proposers of candidates: the draft model, and the suffix index of the text so far."""
RETIRED_DRAFT_TYPES = {"copy": "suffix"}
"""Retired names of draft types, accepted for one more release, also in cost files."""
RETIRED_FIELDS = {"tree_spine": "tree_main_chain"}
"""Retired names of DecodeConfig's fields, accepted for one more release."""
DRAFT_KINDS = ("none", "chain", "tree", "auto")
"""How candidates are proposed: not at all, a chain of one length, a tree of one size, or whatever
pays for itself. Without a drafter "auto" is plain decoding."""
TREE_BUDGET = 23
"""Nodes of a tree unless told otherwise: with its root it fills a pass of 24 rows."""
MAX_TREE_BUDGET = MAX_VERIFY - 1
AUTO_TREE_BUDGET = 63
"""Nodes that "auto" tries at most unless told otherwise; a node of a 27B hybrid takes 3.5 MB."""

REASONING_FORMATS = ("auto", "none")
"""Whether the thoughts before the answer to a conversation are told apart from it, as its template
marks them, or stay in its text."""

MAX_DRAFT = 1 << 16
MAX_N_PROBS = 1 << 20
MAX_LOGIT_CHANGE = 1e28
"""Of a logit, by a bias or a penalty: as many as repeat_last_n times that is a float32 still."""
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 64) - 1


def _accept_retired_fields(cls: type[Any]) -> Any:
    """Lets RETIRED_FIELDS be given to a config's constructor, and read."""
    init = cls.__init__

    @functools.wraps(init)
    def accept(self: Any, *args: Any, **values: Any) -> None:
        for old, new in RETIRED_FIELDS.items():
            if old in values:
                values[new] = values.pop(old)
        init(self, *args, **values)

    cls.__init__ = accept
    for old, new in RETIRED_FIELDS.items():
        setattr(cls, old, property(operator.attrgetter(new)))
    return cls


@_accept_retired_fields
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
    logit_bias: added to the logits of tokens, by id, before anything else; -inf bans one.
    n_probs: steps tell the log-probability of every token drawn, and those of so many of the best;
        None: neither. post_sampling_probs: as what the draw chose from, not as the model has them.
    reasoning_format: one of REASONING_FORMATS.
    cache_prompt: the prompt begins with what is kept of earlier answers, else all of it is
        computed; what it leaves behind is kept either way.
    draft: one of DRAFT_KINDS.
    draft_type: names of the proposers, one or several of DRAFT_TYPES; None: with "auto" all of
        them, else the draft model, or the suffix index where there is none.
    draft_max: positions that a round drafts at most; None is what the drafter's block holds.
    draft_min: a round drafts so many candidates or none.
    tree_budget: candidates of a tree; with "auto" at most so many. None is 23, with "auto" 63.
    tree_main_chain: a tree holds its whole main chain before it branches.
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n_probs: int | None = None
    post_sampling_probs: bool = False
    reasoning_format: str = "auto"
    cache_prompt: bool = True
    draft: str = "auto"
    draft_type: str | Iterable[str] | None = None
    draft_max: int | None = None
    draft_min: int = 0
    tree_budget: int | None = None
    tree_main_chain: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _set(self, "max_tokens", integer("max_tokens", self.max_tokens, 0, MAX_N_CTX))
        _set(self, "temperature", number("temperature", self.temperature, 0.0, math.inf))
        _set(self, "top_k", integer("top_k", self.top_k, -(1 << 31), (1 << 31) - 1))
        _set(self, "top_p", number("top_p", self.top_p, 0.0, 1.0))
        _set(self, "min_p", number("min_p", self.min_p, 0.0, 1.0))
        if self.repeat_penalty == 0.0:
            raise ValueError("repeat_penalty is 0, must be greater than 0 (1 is off)")
        min_penalty = 1e-28  # of MAX_LOGIT_CHANGE the inverse
        _set(
            self,
            "repeat_penalty",
            number("repeat_penalty", self.repeat_penalty, min_penalty, MAX_LOGIT_CHANGE),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _set(self, name, number(name, getattr(self, name), -MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE))
        _set(self, "repeat_last_n", integer("repeat_last_n", self.repeat_last_n, 0, MAX_N_CTX))
        if self.seed is not None:
            _set(self, "seed", integer("seed", self.seed, SEED_MIN, SEED_MAX))
        _set(self, "stop", _stop_texts(self.stop))
        _set(self, "logit_bias", _biases(self.logit_bias))
        if self.n_probs is not None:
            _set(self, "n_probs", integer("n_probs", self.n_probs, 0, MAX_N_PROBS))
        for name in ("ignore_eos", "post_sampling_probs", "cache_prompt", "tree_main_chain"):
            flag(name, getattr(self, name))
        choice("draft", self.draft, DRAFT_KINDS)
        if self.draft_type is not None:
            _set(self, "draft_type", _names(self.draft_type))
        choice("reasoning_format", self.reasoning_format, REASONING_FORMATS)
        _set(self, "draft_min", integer("draft_min", self.draft_min, 0, MAX_DRAFT))
        if self.draft_max is not None:
            _set(self, "draft_max", integer("draft_max", self.draft_max, 1, MAX_DRAFT))
            if self.draft_min > self.draft_max:
                raise ValueError(
                    f"draft_min is {self.draft_min}, must be at most draft_max, {self.draft_max}"
                )

        if self.tree_budget is not None:
            _set(self, "tree_budget", integer("tree_budget", self.tree_budget, 1, MAX_TREE_BUDGET))

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts, whatever form they were given in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def has_penalties(self) -> bool:
        """Whether a bias or the tokens already seen change the logits."""
        return bool(self.logit_bias) or self.penalises_history

    @property
    def penalises_history(self) -> bool:
        """Whether the tokens already seen change the logits."""
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _biases(values: object) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias is {values!r}, must map token ids to numbers")
    biases = {}
    for token, bias in values.items():
        token = integer("a token of logit_bias", token, 0, (1 << 31) - 1)
        is_ban = bias == -math.inf
        biases[token] = (
            -math.inf if is_ban else number("logit_bias", bias, -MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE)
        )
    return biases


def _set(config: object, name: str, value: object) -> None:
    object.__setattr__(config, name, value)


def _names(names: object) -> tuple[str, ...]:
    """Names of proposers; which there are is for the decoder to know."""
    given = tuple(names.split(",")) if isinstance(names, str) else names
    if not isinstance(given, Iterable):
        raise ValueError(f"draft_type is {names!r}, must be a name or several names")
    given = tuple(given)
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"draft_type holds {name!r}, must hold names only")
    if not given:
        raise ValueError(f"draft_type is empty; name at least one of {', '.join(DRAFT_TYPES)}")
    stripped = [name.strip() for name in given]
    return tuple(RETIRED_DRAFT_TYPES.get(name, name) for name in stripped)


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
