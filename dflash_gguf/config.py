"""Settings of loading a model and of generating text. Frozen, and validated when made."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from ._validate import choice, flag, integer, number
from .native import CACHE_TYPES as CACHE_TYPES
from .native import DEFAULT_N_CTX as DEFAULT_N_CTX
from .native import MAX_VERIFY
from .native import LoadConfig as LoadConfig

DRAFT_TYPES = ("dflash", "mtp", "suffix")
"""Names of proposers: two kinds of draft models, and the suffix index over the text so far."""
RETIRED_DRAFT_TYPES = {"copy": "suffix"}
"""Retired names of draft types, accepted for one more release, also in cost files."""
RETIRED_FIELDS = {"tree_spine": "tree_main_chain"}
"""Retired names of DecodeConfig's fields, accepted for one more release."""
DRAFT_KINDS = ("none", "chain", "tree", "auto")
"""Draft modes: plain decoding, chains of one length, trees of one size, or ("auto") as many
candidates as pay for themselves. Without a drafter the suffix index proposes."""
TREE_BUDGET = 23
"""Default nodes of a tree: with its root it fills a pass of 24 rows."""
MAX_TREE_BUDGET = MAX_VERIFY - 1
AUTO_TREE_BUDGET = 63
"""Default upper limit of nodes for "auto". A node takes 3.5 MB of memory on a 27B hybrid model."""

REASONING_FORMATS = ("auto", "none")
"""Ways to return the reasoning that a chat template marks: apart from the text, or within it."""

RESPONSE_FORMATS = ("text", "json_object", "json_schema")
"""Types of `response_format`, as in OpenAI's API."""
CONSTRAINTS = ("response_format", "json_schema", "grammar", "regex")
"""Fields of DecodeConfig that constrain the answer; at most one may be given."""

FLAGS = (
    *("ignore_eos", "post_sampling_probs", "prompt_logprobs", "cache_prompt"),
    "tree_main_chain",
)
MAX_DRAFT = 1 << 16
MAX_TOKENS = 1 << 30
MAX_N_PROBS = 1 << 20
MAX_LOGIT_CHANGE = 1e28
"""Largest bias or penalty: the sum of repeat_last_n of them still fits a float32."""
SEED_MIN, SEED_MAX = -(1 << 63), (1 << 64) - 1


class Constraint(NamedTuple):
    """A constraint of an answer, not compiled.

    kind: "json_schema", "grammar" or "regex". text: JSON text of the schema, the grammar or the
    regular expression. is_strict: True to refuse keywords of a schema that cannot be enforced,
    False to ignore them. field: setting that gave the constraint, for messages.
    """

    kind: str
    text: str
    is_strict: bool
    field: str


def _accept_retired_fields(cls: type[Any]) -> Any:
    """Lets a config's constructor and its attributes accept the names in RETIRED_FIELDS."""
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
    """Settings of one answer. Defaults are llama.cpp's, except temperature 0.0 (greedy).

    ValueError for a bad value.
    max_tokens: most tokens to sample; None: until the context is full.
    temperature: 0 takes the best token after penalties and ignores top_k, top_p and min_p.
    top_k: tokens kept by rank; 0 or less keeps all.
    top_p: probability mass to keep; 1 keeps all tokens. min_p: smallest probability to keep, as a
        share of the best token's.
    repeat_penalty (off at 1), presence_penalty, frequency_penalty (off at 0): lower the logits of
        the last repeat_last_n tokens of prompt and answer.
    seed: any signed or unsigned 64-bit integer; None chooses one, which the result reports.
    stop: one text or several that end the answer, and are not part of it.
    stop_token_ids: further token ids that end the answer; their text is not part of it.
    ignore_eos: True to never sample a token that ends generation.
    logit_bias: numbers to add to logits, by token id, before anything else; -inf bans a token.
    n_probs: each step reports the log-probability of its tokens, and those of the n_probs best
        tokens beside each; None reports none. post_sampling_probs: True for probabilities after
        biases, penalties, truncation and temperature, False for the model's.
    prompt_logprobs: True to report these of the prompt's tokens too, for which the prompt is
        computed in full. Needs n_probs, and cache_prompt to be False.
    reasoning_format: "auto": reasoning apart from the text; "none": within it, with its marks.
    response_format, json_schema, grammar, regex: constrain the answer, of which reasoning is no
        part; at most one may be given. response_format: OpenAI's object of type "text",
        "json_object" or "json_schema". json_schema: a schema, or its JSON text. grammar: a text in
        GBNF or Lark. regex: a regular expression that the whole answer matches.
    cache_prompt: True to start from the longest cached prefix of the prompt. False: the prompt is
        computed in full, drafts use no earlier text, and nothing is kept for later requests.
    draft: "none", "chain", "tree", or "auto": as many candidates as pay for themselves.
    draft_type: names of proposers, of "dflash", "mtp" and "suffix"; None: with "auto" all, else
        the draft model, or the suffix index if no drafter is loaded.
    draft_max: most positions to draft in a round; None: the drafter's block.
    draft_min: a round with fewer candidates drafts nothing.
    tree_budget: nodes of a tree, with "auto" the most nodes. None: 23, with "auto" 63.
    tree_main_chain: True to keep the whole main chain before branches are added.
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
    stop_token_ids: Iterable[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n_probs: int | None = None
    post_sampling_probs: bool = False
    prompt_logprobs: bool = False
    reasoning_format: str = "auto"
    response_format: Mapping[str, Any] | None = None
    json_schema: Mapping[str, Any] | bool | str | None = None
    grammar: str | None = None
    regex: str | None = None
    cache_prompt: bool = True
    draft: str = "auto"
    draft_type: str | Iterable[str] | None = None
    draft_max: int | None = None
    draft_min: int = 0
    tree_budget: int | None = None
    tree_main_chain: bool = False

    def __post_init__(self) -> None:
        if self.repeat_penalty == 0.0:
            raise ValueError("repeat_penalty is 0, must be greater than 0 (1 is off)")
        for field_ in fields(self):
            name, value = field_.name, getattr(self, field_.name)
            if value is None and field_.default is None:
                continue
            if name in INTEGER_RANGES:
                object.__setattr__(self, name, integer(name, value, *INTEGER_RANGES[name]))
            elif name in NUMBER_RANGES:
                object.__setattr__(self, name, number(name, value, *NUMBER_RANGES[name]))
            elif name in READERS:
                object.__setattr__(self, name, READERS[name](value))
        for name in FLAGS:
            flag(name, getattr(self, name))
        if self.prompt_logprobs and (self.n_probs is None or self.cache_prompt):
            raise ValueError("prompt_logprobs needs n_probs, and cache_prompt to be False")
        self._check_constraints()
        choice("draft", self.draft, DRAFT_KINDS)
        choice("reasoning_format", self.reasoning_format, REASONING_FORMATS)
        if self.draft_max is not None and self.draft_min > self.draft_max:
            raise ValueError(
                f"draft_min is {self.draft_min}, must be at most draft_max, {self.draft_max}"
            )

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple, also if a single one was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_constraints(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; leave out all but one")
        if given and self.ignore_eos:
            raise ValueError(
                f"ignore_eos is true, but {given[0]} decides where the answer ends: leave one out"
            )

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the answer, None if it is free."""
        if self.response_format is not None:
            wanted = self.response_format
            inner = wanted.get("json_schema", wanted)
            schema = inner.get("schema", {"type": "object"})
            is_strict = inner.get("strict") is True
            return Constraint("json_schema", json.dumps(schema), is_strict, "response_format")
        if (schema := self.json_schema) is not None:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            return Constraint("json_schema", text, False, "json_schema")
        if self.grammar is not None:
            return Constraint("grammar", self.grammar, True, "grammar")
        if self.regex is not None:
            return Constraint("regex", self.regex, True, "regex")
        return None

    @property
    def has_penalties(self) -> bool:
        """True if biases or penalties change the logits."""
        return bool(self.logit_bias) or self.penalises_history

    @property
    def penalises_history(self) -> bool:
        """True if penalties for earlier tokens change the logits."""
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


def _texts(name: str, value: object, kind: str) -> tuple[str, ...]:
    if not isinstance(value, Iterable):
        raise ValueError(f"{name} is {value!r}, must be a {kind} or several {kind}s")
    texts = (value,) if isinstance(value, str) else tuple(value)
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{name} holds {text!r}, must hold {kind}s only")
    return tuple(map(str, texts))


def _names(value: object) -> tuple[str, ...]:
    """Splits names of proposers at commas; the decoder, which has the proposers, checks them."""
    given = value.split(",") if isinstance(value, str) else value
    names = [name.strip() for name in _texts("draft_type", given, "name")]
    if not names:
        raise ValueError(f"draft_type is empty; name at least one of {', '.join(DRAFT_TYPES)}")
    return tuple(RETIRED_DRAFT_TYPES.get(name, name) for name in names)


def _stop_texts(value: object) -> tuple[str, ...]:
    texts = _texts("stop", value, "text")
    if "" in texts:
        raise ValueError("stop holds an empty text, which would end every answer at once")
    return texts


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes)):
        raise ValueError(f"stop_token_ids is {value!r}, must be a list of token ids")
    return tuple(integer("a token of stop_token_ids", x, 0, (1 << 31) - 1) for x in value)


def _response_format(value: object) -> Mapping[str, Any] | None:
    """Checks OpenAI's response_format; None for free text."""
    if not isinstance(value, Mapping):
        raise ValueError(f"response_format is {value!r:.80}, must be an object with a type")
    kind = choice("type of response_format", value.get("type"), RESPONSE_FORMATS)
    if kind == "text":
        return None
    inner = value.get("json_schema", value)
    if not isinstance(inner, Mapping):
        raise ValueError(f"json_schema of response_format is {inner!r:.80}, must be an object")
    if kind == "json_schema" and "schema" not in inner:
        raise ValueError("response_format has the type json_schema, but no schema")
    if not isinstance(inner.get("schema", {}), (Mapping, bool)):
        raise ValueError(f"schema of response_format is {inner['schema']!r:.80}, must be an object")
    return value


def _json_schema(value: object) -> Mapping[str, Any] | bool | str:
    if not isinstance(value, (Mapping, bool, str)):
        raise ValueError(f"json_schema is {value!r:.80}, must be an object or its JSON text")
    return value


def _grammar(name: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name} is {value!r:.80}, must be a text that is not empty")
        return value

    return read


INTEGER_RANGES = {
    "max_tokens": (0, MAX_TOKENS),
    "top_k": (-(1 << 31), (1 << 31) - 1),
    "repeat_last_n": (0, MAX_TOKENS),
    "seed": (SEED_MIN, SEED_MAX),
    "n_probs": (0, MAX_N_PROBS),
    "draft_min": (0, MAX_DRAFT),
    "draft_max": (1, MAX_DRAFT),
    "tree_budget": (1, MAX_TREE_BUDGET),
}
NUMBER_RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repeat_penalty": (1e-28, MAX_LOGIT_CHANGE),
    "presence_penalty": (-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
    "frequency_penalty": (-MAX_LOGIT_CHANGE, MAX_LOGIT_CHANGE),
}
READERS = {
    "stop": _stop_texts,
    "stop_token_ids": _stop_token_ids,
    "logit_bias": _biases,
    "draft_type": _names,
    "response_format": _response_format,
    "json_schema": _json_schema,
    "grammar": _grammar("grammar"),
    "regex": _grammar("regex"),
}
"""Functions that check and convert fields of DecodeConfig, by field."""
