"""Fields of request bodies, and their translation to sampling settings."""

from __future__ import annotations

import codecs
import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from ..config import REASONING_FORMATS, DecodeConfig
from ..text.chat import template_values
from ..text.tools.offer import tools_of
from .foreign_fields import translate

MAX_CHOICES = 128
"""Maximum number of prompts in a request, and of answers to each prompt."""
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 16 << 10
"""Most characters of all stop texts of a request. Each takes about 300 bytes while they match."""
MAX_TOP_LOGPROBS = 20
"""Maximum of `top_logprobs` and of OpenAI's `logprobs`; `n_probs` may be larger."""
MAX_N_PROBS = 1024
ALLOWED_TOOLS = "allowed_tools"
"""Type of a tool_choice that names some of the tools."""
READ_ELSEWHERE = {"logit_bias", "n_probs", "reasoning_format"}
"""Fields of DecodeConfig that `config_of` does not copy, as other functions convert them."""
RANDOM_SEEDS = (-1, (1 << 32) - 1)
"""Seeds that ask for a random seed, as in llama.cpp."""

SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")
"""Samplers in their order, with llama-server's names."""
SAMPLER_LETTERS = {
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "x": "xtc",
    "a": "adaptive_p",
    "t": "temperature",
}
"""Samplers of llama-server by the letters of its text form; those not in SAMPLERS are off."""


class BadRequestError(Exception):
    """Error response to a request, 400 by default. more: further members of the error object."""

    def __init__(
        self,
        sentence: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        **more: Any,
    ) -> None:
        super().__init__(sentence)
        self.status, self.kind, self.more = status, kind, more


class StreamOptions(msgspec.Struct):
    """Options of a stream. include_usage: the last event reports the number of tokens."""

    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """Fields of all routes that generate; None takes the value of the command line."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    n_cmpl: int | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    samplers: str | list[str] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    grammar: str | None = None
    regex: str | None = None
    logit_bias: dict[str, float | bool] | list[tuple[int | str, float | bool]] | None = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    response_fields: list[str] | None = None
    timings_per_token: bool | None = None
    verbose: bool | None = None
    sse_ping_interval: float | None = None
    draft: str | None = None
    draft_type: str | list[str] | None = None
    draft_max: int | None = None
    draft_min: int | None = None
    tree_budget: int | None = None

    @property
    def has_one_answer(self) -> bool:
        """True if the route's responses have room for one answer."""
        return False

    @property
    def left_out(self) -> list[str]:
        """Names of tools and items that are ignored, as nothing here knows them."""
        return []

    def as_chat(self, **fields: Any) -> ChatBody:
        """Returns a chat request with the fields that all routes share, and with `fields`."""
        shared = {name: getattr(self, name) for name in Body.__struct_fields__}
        return ChatBody(**(shared | fields))


class LlamaServerBody(Body, kw_only=True):
    """Fields of llama-server's /completion."""

    prompt: Any = None
    add_special: bool | None = None
    logprobs: int | None = None


class CompletionBody(Body, kw_only=True):
    """Fields of OpenAI's /v1/completions."""

    prompt: Any = None
    add_special: bool | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None


class ChatBody(Body, kw_only=True):
    """Fields of /v1/chat/completions: OpenAI's, and additions of llama-server, vLLM and SGLang."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning_budget: int | None = None
    reasoning_format: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_meta_info: bool | None = None


class SlotBody(msgspec.Struct, kw_only=True):
    """Fields of POST /slots/N."""

    filename: str | None = None
    model: str | None = None


class TemplateBody(msgspec.Struct, kw_only=True):
    """Fields of POST /apply-template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning_budget: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    model: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of POST /tokenize."""

    content: Any = ""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Fields of POST /detokenize."""

    tokens: list[int] = []
    model: str | None = None


B = TypeVar("B", bound=msgspec.Struct)


def read(data: bytes, kind: type[B]) -> tuple[B, list[str]]:
    """Returns a parsed request body, its synonyms renamed, and the names of unknown fields.

    Raises BadRequestError or ValueError, which name the wrong field.
    """
    try:
        body = msgspec.json.decode(data.removeprefix(codecs.BOM_UTF8) or b"{}")
    except RecursionError:
        raise BadRequestError("the body nests too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = _unfit_text(data) or error
        raise BadRequestError(f"the body is not valid JSON: {why}") from None
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    ignored = translate(body, kind.__struct_fields__)
    try:
        return msgspec.convert(body, kind), ignored
    except msgspec.ValidationError as error:
        raise BadRequestError(_sentence(str(error))) from None
    except RecursionError:
        raise BadRequestError("the body nests too deeply") from None


def _unfit_text(data: bytes) -> str | None:
    """Returns why a malformed JSON body is not even valid text; None if its text is valid."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return f"byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8"
    if "\0" in text:
        return f"byte {data.index(0)} is NUL; send UTF-8, and NUL in a text as \\u0000"
    with contextlib.suppress(ValueError, RecursionError):
        if re.search("[\ud800-\udfff]", json.dumps(json.loads(text), ensure_ascii=False)):
            return "a text holds half of a surrogate pair, as of an emoji cut in two"
    return None


def n_choices(body: Body) -> int:
    """Returns the number of answers to each prompt."""
    n = body.n if body.n is not None else body.n_cmpl
    return 1 if n is None else _within("n", n, 1, 1 if body.has_one_answer else MAX_CHOICES)


def config_of(body: Body, defaults: DecodeConfig, n_ctx: int, n_probs: int | None) -> DecodeConfig:
    """Returns a request's sampling settings, except logit_bias. Raises BadRequestError."""
    given: dict[str, Any] = {}
    for name in {x.name for x in fields(DecodeConfig)} - READ_ELSEWHERE:
        if (value := getattr(body, name, None)) is not None:
            given[name] = value
    if body.repeat_last_n is not None:
        given["repeat_last_n"] = n_ctx if body.repeat_last_n == -1 else body.repeat_last_n
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if (value := getattr(body, name)) is not None:
            given["max_tokens"] = None if value == -1 else _within(name, value, 0, 1 << 30)
            break
    if body.seed is not None:
        given["seed"] = None if body.seed in RANDOM_SEEDS else body.seed
    if body.stop is not None:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        if len(stops) > MAX_STOPS:
            raise BadRequestError(f"stop holds {len(stops)} texts, the limit is {MAX_STOPS}")
        if (n := sum(map(len, stops))) > MAX_STOP_CHARACTERS:
            raise BadRequestError(
                f"stop holds {n} characters, the limit is {MAX_STOP_CHARACTERS} in all texts"
            )
        given["stop"] = stops
    if n_probs is not None:
        given["n_probs"] = _within("n_probs", n_probs, 0, MAX_N_PROBS)
    config = replace(defaults, **given)
    if body.samplers is not None:
        _check_samplers(body.samplers, config)
    return config


def _check_samplers(samplers: str | list[str], config: DecodeConfig) -> None:
    """Raises BadRequestError if llama-server's `samplers` would sample otherwise than SAMPLERS."""
    is_greedy = config.temperature == 0  # greedy sampling ignores the cut-offs
    active = {
        "penalties": config.penalises_history,
        "top_k": config.top_k > 0 and not is_greedy,
        "top_p": config.top_p < 1 and not is_greedy,
        "min_p": config.min_p > 0 and not is_greedy,
        "temperature": config.temperature != 1,
    }
    if isinstance(samplers, str):
        samplers = [SAMPLER_LETTERS.get(letter, letter) for letter in samplers]
    for name in samplers:
        if name not in SAMPLER_LETTERS.values():
            raise BadRequestError(
                f"samplers holds {name!r:.40}, must hold only {', '.join(SAMPLERS)}"
            )
    wanted = [name for name in SAMPLERS if active[name]]
    if [name for name in samplers if active.get(name)] != wanted:
        raise BadRequestError(
            f"samplers is {', '.join(samplers)[:200]!r}, must hold in this order the samplers that "
            f"are not switched off: {', '.join(wanted)}"
        )


def keep_alive_s(body: Body, default: float) -> float:
    """Returns the seconds of silence before a stream sends a keep-alive comment; inf for never."""
    value = body.sse_ping_interval
    if value is None:
        return default
    if value != -1 and value < 1:
        raise BadRequestError(f"sse_ping_interval is {value:g}, must be at least 1, or -1 for none")
    return math.inf if value == -1 else value


def biases(body: Body, tokenize: Callable[[str], list[int]], n_vocab: int) -> dict[int, float]:
    """Returns the logit bias of each token id; a text biases each of its tokens, false bans.

    JSON objects have text keys only, so a key of digits is a token id.
    """
    given = body.logit_bias
    if given is None:
        return {}
    pairs: Sequence[tuple[int | str, float | bool]]
    if isinstance(given, Mapping):
        pairs = [(int(k) if re.fullmatch(r"\d{1,9}", k) else k, v) for k, v in given.items()]
    else:
        pairs = given
    by_token: dict[int, float] = {}
    for key, value in pairs:
        if value is True:
            raise BadRequestError(
                f"logit_bias of {key!r:.40} is true, must be a number, or false to ban"
            )
        bias = -math.inf if value is False else float(value)
        for token in [key] if isinstance(key, int) else tokenize(key):
            if not 0 <= token < n_vocab:
                raise BadRequestError(
                    f"logit_bias: token id {token} is outside the vocabulary of {n_vocab}"
                )
            by_token[token] = bias
    return by_token


def chat_n_probs(body: ChatBody) -> int | None:
    """Returns how many top log-probabilities a chat answer lists per token; None for no list."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true: set logprobs too")
    if body.logprobs:
        return _within("top_logprobs", body.top_logprobs or 0, 0, MAX_TOP_LOGPROBS)
    return body.n_probs or None


def completion_n_probs(body: CompletionBody) -> int | None:
    """Returns how many top log-probabilities a completion lists per token; None for no list."""
    if body.logprobs is not None:
        return _within("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    return body.n_probs or None


class ToolChoice(NamedTuple):
    """The calls that a request asks for.

    allowed: names of the tools that may be called, None for all. is_required: True if the answer
    must be a call. is_single: True if the answer ends with its first call.
    """

    allowed: list[str] | None = None
    is_required: bool = False
    is_single: bool = False


def tool_choice(body: ChatBody) -> ToolChoice:
    """Returns the calls that a request asks for. Raises BadRequestError or ValueError."""
    choice = body.tool_choice
    names = {one["function"]["name"] for one in tools_of(body.tools or ())}
    if choice in (None, "auto"):
        return ToolChoice()
    if choice == "none":
        return ToolChoice([])
    if not names:
        raise BadRequestError("tool_choice asks for a call, but tools is empty: give tools")
    if choice == "required":
        return ToolChoice(None, is_required=True)
    if isinstance(choice, dict) and choice.get("type") == ALLOWED_TOOLS:
        return _allowed_tools(choice.get(ALLOWED_TOOLS, choice), names)
    if (name := _name_of(choice)) is None:
        raise BadRequestError(
            f"tool_choice is {choice!r:.80}, must be auto, none, required, or an object of type "
            f"function with the name of a function, or of type {ALLOWED_TOOLS}"
        )
    return ToolChoice([_known(name, names)], is_required=True, is_single=True)


def _allowed_tools(given: Any, names: Collection[str]) -> ToolChoice:
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (0, 0)
    chosen = [_name_of(one) for one in tools] if isinstance(tools, list) else [None]
    if mode not in ("auto", "required") or None in chosen:
        raise BadRequestError(
            f"tool_choice: {ALLOWED_TOOLS} is {given!r:.80}, must have mode, auto or required, and "
            "tools, a list of functions with names"
        )
    if mode == "required" and not chosen:
        raise BadRequestError(f"tool_choice: mode is required, but {ALLOWED_TOOLS} names no tool")
    allowed = [_known(str(name), names) for name in dict.fromkeys(chosen)]
    return ToolChoice(allowed, is_required=mode == "required")


def _name_of(choice: Any) -> str | None:
    """Returns the name of the function that a part of tool_choice names; None for other values."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _known(name: str, names: Collection[str]) -> str:
    if name not in names:
        raise BadRequestError(f"tool_choice names the function {name!r:.80}, which is not in tools")
    return name


def thinking(
    body: ChatBody | TemplateBody, is_on: bool | None
) -> tuple[bool | None, dict[str, Any]]:
    """Returns thinking mode (None: the template decides) and template variables of a request."""
    values = template_values(body.chat_template_kwargs or {}, "chat_template_kwargs")
    wanted = values.pop("enable_thinking", None)
    if body.enable_thinking is not None:
        wanted = body.enable_thinking
    if body.reasoning_effort is not None:
        if body.reasoning_effort == "none":
            wanted = False
        else:
            values.setdefault("reasoning_effort", body.reasoning_effort)
    if body.reasoning_budget is not None:
        if body.reasoning_budget not in (-1, 0):
            raise BadRequestError(
                f"reasoning_budget is {body.reasoning_budget}, must be -1 (no limit) or 0 (none)"
            )
        wanted = False if body.reasoning_budget == 0 else wanted
    return (is_on if wanted is None else wanted), values


def reasoning_format(name: str | None, default: str) -> str:
    """Returns a name in REASONING_FORMATS; llama-server's deepseek formats become auto."""
    if name is None:
        return default
    name = "auto" if name in ("deepseek", "deepseek-legacy") else name
    if name not in REASONING_FORMATS:
        raise BadRequestError(f"reasoning_format is {name!r}, must be auto, deepseek or none")
    return name


def _within(name: str, value: int, low: int, high: int) -> int:
    bounds = f"{low}" if low == high else f"{low} to {high}"
    if not low <= value <= high:
        raise BadRequestError(f"{name} is {value}, must be {bounds}")
    return value


def _sentence(text: str) -> str:
    match = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", text, re.DOTALL)
    assert match is not None
    what = match[1].replace("`", "")
    what = what[:1].lower() + what[1:]
    return f"{match[2]}: {what}" if match[2] else what
