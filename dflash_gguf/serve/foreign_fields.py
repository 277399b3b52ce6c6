"""Fields of other servers: synonyms of ours, and fields that would change the answer."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

SYNONYMS = {
    "add_special_tokens": "add_special",
    "max_new_tokens": "max_tokens",
    "num_predict": "max_tokens",
    "prompt": "content",
    "random_seed": "seed",
    "repetition_penalty": "repeat_penalty",
    "stop_sequences": "stop",
    "think": "enable_thinking",
}
"""Names that vLLM, SGLang, TGI, Ollama, Mistral and Anthropic have for fields of this server."""

CONSTRAINTS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "ebnf": "grammar",
    "grammar_string": "grammar",
}
"""Names that vLLM, SGLang and others have for constraints of this server."""
STRUCTURED_OUTPUTS = {
    "json": "json_schema",
    "regex": "regex",
    "grammar": "grammar",
    "choice": "choice",
    "json_object": "json_object",
}
"""Constraints in vLLM's field structured_outputs."""

EMPTY: tuple[Any, ...] = (None, "", [], {})
MAX_IGNORED = 8
"""Most names of unknown fields that a response lists."""

_ROWS: tuple[tuple[tuple[Any, ...], str, str], ...] = (
    (
        (),
        "give response_format, json_schema, grammar or regex",
        "structural_tag format output_format",
    ),
    (
        ("none", "auto", {"type": "none"}, {"type": "auto"}),
        "give tools, of type function",
        "functions function_call",
    ),
    (
        ("none", "auto", {"type": "none"}, {"type": "auto"}),
        "tools can be called in chats only, leave it out",
        "tools tool_choice",
    ),
    (
        (),
        "only tools of type function can be called, leave it out",
        "web_search_options mcp_servers",
    ),
    ((["text"],), "models take and give text only, leave it out", "modalities"),
    ((), "models take and give text only, leave it out", "audio image_data images prompt_embeds"),
    ((), "give its fields beside the others", "extra_body options parameters sampling_params"),
    ((), "give a message of role system", "system"),
    ((), "give enable_thinking", "thinking"),
    ((), "give reasoning_effort", "reasoning"),
    ((-1,), "give reasoning_budget", "thinking_budget thinking_token_budget"),
    ((True,), "give reasoning_format", "include_reasoning separate_reasoning stream_reasoning"),
    ((True,), "give temperature 0", "do_sample"),
    ((False,), "give ignore_eos", "ban_eos_token"),
    (
        (),
        "leave it out",
        "allowed_token_ids bad_words bad_words_ids banned_strings banned_tokens chat_template "
        "custom_logit_processor custom_params custom_token_bans documents input_prefix "
        "input_suffix lora lora_path lora_request adapter_id logit_processors logits_processors "
        "negative_prompt prompt_logprobs sampler_order sampler_priority stop_regex suffix truncate "
        "truncate_prompt_tokens vllm_xargs",
    ),
    (
        (0,),
        "leave it out",
        "diversity_penalty dry_multiplier dynamic_temperature dynatemp_range early_stopping echo "
        "epsilon_cutoff eta_cutoff include_stop_str_in_output min_length min_new_tokens min_tokens "
        "mirostat mirostat_mode n_indent no_repeat_ngram_size no_stop_trim penalty_alpha "
        "repetition_penalty_range return_full_text return_hidden_states return_token_ids "
        "return_tokens_as_token_ids safe_prompt smoothing_factor top_a use_beam_search watermark "
        "xtc_probability",
    ),
    (
        (1,),
        "leave it out",
        "best_of encoder_repetition_penalty guidance_scale length_penalty num_beams rep_pen "
        "skip_special_tokens temperature_last tfs tfs_z typ_p typical typical_p",
    ),
    ((0, 1), "leave it out", "min_keep"),
    ((-1,), "leave it out", "adaptive_target"),
    ((-1, 0), "leave it out", "nsigma t_max_predict_ms top_n_sigma"),
    ((False,), "leave it out", "add_special_tokens"),
    (("medium",), "leave it out", "verbosity"),
)
"""Fields of other servers without effect here, in rows of: values besides EMPTY that are accepted,
as they change nothing; advice for any other value; names of fields. False equals 0, True 1."""

FOREIGN_FIELDS = {name: (off, todo) for off, todo, names in _ROWS for name in names.split()}


def translate(body: dict[str, Any], own: Collection[str]) -> list[str]:
    """Renames the synonyms of own fields in a request body. Returns the names of unknown fields.

    Raises ValueError for a field that is not served and would change the answer.
    """
    if "response_format" in own:
        _rename_constraints(body)
    for name, ours in SYNONYMS.items():
        value = body.get(name)
        if ours not in own or name in own or value in EMPTY:
            continue
        del body[name]
        if body.get(ours) not in (None, value):
            raise ValueError(
                f"{name} is {_shown(value)} and {ours} is {_shown(body[ours])}: leave one out"
            )
        body[ours] = value
        if name == "repetition_penalty" and value != 1 and body.get("repeat_last_n") is None:
            body["repeat_last_n"] = -1  # vLLM penalises tokens of the whole text
    unknown = []
    for name, value in body.items():
        if name in own or value is None:
            continue
        if name not in FOREIGN_FIELDS:
            unknown.append(name)
            continue
        off, todo = FOREIGN_FIELDS[name]
        if value not in EMPTY and value not in off:
            raise ValueError(f"{name}: {_shown(value)} is not supported, {todo}")
    return listed(unknown)


def _rename_constraints(body: dict[str, Any]) -> None:
    """Renames the constraints of other servers, and drops empty ones, which constrain nothing."""
    for name in ("grammar", "regex", "json_schema", "response_format"):
        if body.get(name) == "":
            del body[name]
    given = [(name, ours, body.pop(name)) for name, ours in CONSTRAINTS.items() if name in body]
    outputs = body.pop("structured_outputs", None) or {}
    if not isinstance(outputs, dict):
        raise ValueError(f"structured_outputs is {_shown(outputs)}, must be an object")
    for name, value in outputs.items():
        if name not in STRUCTURED_OUTPUTS and value not in (*EMPTY, False):
            known = ", ".join(STRUCTURED_OUTPUTS)
            raise ValueError(f"structured_outputs holds {name!r:.40}, must hold one of {known}")
        given.append((f"structured_outputs.{name}", STRUCTURED_OUTPUTS.get(name, ""), value))
    for name, ours, value in given:
        if value in EMPTY or value is False:
            continue
        if ours == "choice":
            ours, value = "grammar", _choices(name, value)
        elif ours == "json_object":
            ours, value = "response_format", {"type": "json_object"}
        if body.get(ours) not in (None, value):
            raise ValueError(f"{name} and {ours} are given: leave one out")
        body[ours] = value


def _choices(name: str, texts: Any) -> str:
    """Returns a Lark grammar of texts of which the answer is one."""
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is {_shown(texts)}, must be a list of texts")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in texts)


def listed(names: Iterable[str]) -> list[str]:
    """Returns the names that fit a log and a header, each once, and MAX_IGNORED at most."""
    fit = [name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", name)]
    return list(dict.fromkeys(fit))[:MAX_IGNORED]


def _shown(value: Any) -> str:
    text = msgspec.json.encode(value).decode("utf-8", "replace")
    return text if len(text) <= 40 else text[:37] + "..."
