"""Constrained answers: the same text with and without drafts, valid by an independent checker."""

from __future__ import annotations

import contextlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_models import write_small, write_small_drafter

import dflash_gguf
from dflash_gguf.config import DecodeConfig
from dflash_gguf.constraints import compiler as compiler_module
from dflash_gguf.constraints import matcher as matcher_module
from dflash_gguf.constraints.errors import ConstraintError
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Error
from dflash_gguf.outputs import Result
from dflash_gguf.text.chat import ChatPrompt
from dflash_gguf.text.reasoning import Format

DRAFTS: tuple[dict[str, Any], ...] = (
    {"draft": "chain"},
    {"draft": "tree", "tree_budget": 12},
    {"draft": "tree", "tree_main_chain": True},
    {"draft": "chain", "draft_type": "suffix"},
    {"draft": "auto"},
)
N_ANSWER = 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
EXPRESSION = 'root ::= term (" + " term){0,3}\nterm ::= [0-9]{1,3} | "(" term " * " term ")"'


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema of finite length, for which `check` has all rules."""
    kinds = ["string", "integer", "boolean", "enum", "null", "number"]
    kind = rng.choice(kinds if depth > 1 else [*kinds, "object", "object", "array", "anyOf"])
    inner = depth + 1
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(0, 6)}
    if kind in ("integer", "number"):
        low = rng.randint(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(1, 1000)}
    if kind == "enum":
        return {"enum": rng.sample(["ab", "a", 'q"', 17, True, None, "Straße"], 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, inner) for _ in range(2)]}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, inner), "maxItems": rng.randint(0, 3)}
    if kind == "object":
        names = rng.sample(["a", "ab", "word7", "x y", "é"], rng.randint(0, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, inner) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def check(schema: dict[str, Any], value: Any) -> bool:
    """True if a value satisfies a schema of `random_schema`, by the words of the standard."""
    if "enum" in schema:
        return any(type(x) is type(value) and x == value for x in schema["enum"])
    if "anyOf" in schema:
        return any(check(one, value) for one in schema["anyOf"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(known)
            and all(check(known[name], x) for name, x in value.items())
        )
    if kind == "array":
        is_list = isinstance(value, list) and len(value) <= schema.get("maxItems", 99)
        return is_list and all(check(schema["items"], x) for x in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        whole = kind == "number" or (is_number and value == int(value))
        return is_number and whole and schema["minimum"] <= value <= schema["maximum"]
    return value is None if kind == "null" else isinstance(value, bool)


def is_expression(text: str) -> bool:
    term = r"(?:\d{1,3})"
    while True:
        flat = re.sub(rf"\({term} \* {term}\)", "1", text)
        if flat == text:
            return re.fullmatch(rf"{term}(?: \+ {term}){{0,3}}", text) is not None
        text = flat


CONSTRAINTS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "object": (
        {"response_format": {"type": "json_object"}},
        lambda text: isinstance(json.loads(text), dict),
    ),
    "schema": ({"json_schema": PERSON}, lambda text: check(PERSON, json.loads(text))),
    "strict": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON, "strict": True},
            }
        },
        lambda text: check(PERSON, json.loads(text)),
    ),
    "gbnf": ({"grammar": EXPRESSION}, is_expression),
    "lark": (
        {"grammar": 'start: NAME ("." NAME)*\nNAME: /[a-z]{2,9}/'},
        lambda text: re.fullmatch(r"[a-z]{2,9}(\.[a-z]{2,9})*", text) is not None,
    ),
    "regex": (
        {"regex": r"(word[0-9]+|[A-F]{2}){2,8}!?"},
        lambda text: re.fullmatch(r"(word[0-9]+|[A-F]{2}){2,8}!?", text) is not None,
    ),
}


def is_valid(result: Result, valid: Callable[[str], bool]) -> bool:
    """True if a finished answer is valid; an answer cut at N_ANSWER tokens may be anything."""
    assert result.stop_reason in ("token", "length")
    return result.stop_reason == "length" or valid(result.text)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, int], Decoder]]:
    folder = tmp_path_factory.mktemp("small")
    opened: list[Decoder] = []

    def open_(kind: str, n_parallel: int) -> Decoder:
        target = write_small(folder / f"{kind}.gguf", kind, "f32")
        drafter = write_small_drafter(folder / f"{kind}-drafter.gguf", kind, "f32", target, "f32")
        opened.append(
            dflash_gguf.load(
                target, drafter=drafter, n_ctx=512 * n_parallel, n_threads=1, n_parallel=n_parallel
            )
        )
        return opened[-1]

    yield open_
    for decoder in opened:
        decoder.close()


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_drafts_do_not_change_constrained_texts_of_random_models(
    small: Callable[[str, int], Decoder], kind: str
) -> None:
    decoder, rng, n_accepted, n_ended = small(kind, 1), random.Random(5), 0, 0
    cases = [*CONSTRAINTS.values()]
    samplers = {}, {"temperature": 1.0}, {"temperature": 0.7, "repeat_penalty": 1.2}
    for _ in range(10):
        schema = random_schema(rng)
        cases.append(({"json_schema": schema}, lambda x, s=schema: check(s, json.loads(x))))
    for number, (constraint, valid) in enumerate(cases):
        settings = {**constraint, "max_tokens": N_ANSWER, "seed": number, **samplers[number % 3]}
        prompt = [rng.randrange(256) for _ in range(9)]
        plain = decoder.generate(prompt, draft="none", **settings)
        assert is_valid(plain, valid), (constraint, plain.text)
        n_ended += plain.stop_reason == "token"
        for draft in DRAFTS:
            decoder.forget_texts()
            found = decoder.generate(prompt, **settings, **draft)
            assert found.tokens == plain.tokens, (constraint, draft)
            assert found.stop_reason == plain.stop_reason
            n_accepted += found.n_accepted
    assert n_accepted > 50
    assert n_ended > 8


@pytest.fixture(scope="module")
def python_tiny() -> Iterator[Decoder]:
    with dflash_gguf.load("python-tiny", n_ctx=2048, n_threads=1, n_parallel=6) as decoder:
        yield decoder


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_drafts_do_not_change_constrained_texts(python_tiny: Decoder, name: str) -> None:
    settings, valid = CONSTRAINTS[name]
    prompt = "def example():\n    return "
    for seed, temperature in ((0, 0.0), (1, 0.8), (2, 1.5)):
        common: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_tokens": N_ANSWER}
        plain = python_tiny.generate(prompt, draft="none", **settings, **common)
        assert is_valid(plain, valid)
        for draft in DRAFTS:
            found = python_tiny.generate(prompt, **settings, **common, **draft)
            assert found.tokens == plain.tokens
            assert found.seconds_by_phase["mask"] > 0.0


def test_many_answers_have_constraints_of_their_own(python_tiny: Decoder) -> None:
    cases = [*CONSTRAINTS.values(), ({}, lambda _: True)] * 2
    prompts = [f"# {number}\nvalue = " for number in range(len(cases))]
    alone = [
        python_tiny.generate(
            prompt,
            draft="none",
            max_tokens=N_ANSWER,
            temperature=0.9,
            seed=7,
            n_probs=2,
            **settings,
        )
        for prompt, (settings, _) in zip(prompts, cases, strict=True)
    ]
    for draft in ("none", "chain", "tree", "auto"):
        streams = [
            python_tiny.stream(
                prompt,
                draft=draft,
                max_tokens=N_ANSWER,
                temperature=0.9,
                seed=7,
                n_probs=2,
                **settings,
            )
            for prompt, (settings, _) in zip(prompts, cases, strict=True)
        ]
        logprobs = [[x for step in stream for x in step.logprobs] for stream in streams]
        for stream, right, seen, (_, valid) in zip(streams, alone, logprobs, cases, strict=True):
            found = stream.result()
            assert found.tokens == right.tokens
            assert is_valid(found, valid)
            assert len(seen) == len(found.tokens)


def test_reasoning_is_free_and_the_answer_is_not(python_tiny: Decoder) -> None:
    """The tokenizer has no token of a mark: it is written out, in the middle of drafts."""
    tokens = python_tiny.tokenize("def f():\n    # why?\n")
    settings: dict[str, Any] = {"regex": "(yes|no)!", "temperature": 1.0, "max_tokens": 400}
    n_open = 0
    for seed in range(4):
        for is_open in (False, True):
            prompt = ChatPrompt(tokens, Format("think", is_open))
            plain = python_tiny.generate(prompt, draft="none", seed=seed, **settings)
            for draft in ("tree", "auto"):
                found = python_tiny.generate(prompt, draft=draft, seed=seed, **settings)
                assert found.tokens == plain.tokens
            n_open += plain.stop_reason == "length"
            if plain.stop_reason != "length":
                assert plain.text in ("yes!", "no!")
    assert n_open < 8


def test_the_end_of_reasoning_inside_of_a_draft_starts_the_constraint(python_tiny: Decoder) -> None:
    bias = {python_tiny.tokenize(x, add_special=False)[0]: 30.0 for x in ("<", "/", "think", ">")}
    prompt = ChatPrompt(python_tiny.tokenize("</think></think></think> "), Format("think", True))
    settings: dict[str, Any] = {"regex": "[a-z]{2,5}", "max_tokens": 60, "logit_bias": bias}
    plain = python_tiny.generate(prompt, draft="none", **settings)
    for draft in DRAFTS:
        assert python_tiny.generate(prompt, **settings, **draft).tokens == plain.tokens


def test_stop_texts_and_limits_end_constrained_answers(python_tiny: Decoder) -> None:
    free = python_tiny.generate("x = ", regex="[a-z]{10,20}", seed=1)
    stop = free.text[4:6]
    for draft in ("none", "tree", "auto"):
        found = python_tiny.generate("x = ", regex="[a-z]{10,20}", seed=1, draft=draft, stop=stop)
        assert (found.text, found.stop_reason) == (free.text[: free.text.index(stop)], "text")
        found = python_tiny.generate("x = ", regex="[a-z]{90,}", draft=draft, max_tokens=7)
        assert (len(found.tokens), found.stop_reason) == (7, "length")


def test_probabilities_after_sampling_are_those_of_allowed_tokens(python_tiny: Decoder) -> None:
    for draft in ("none", "tree"):
        settings: dict[str, Any] = {"n_probs": 5, "post_sampling_probs": True, "temperature": 1.0}
        stream = python_tiny.stream("x = ", regex="yes|no", draft=draft, **settings)
        chances = [x for step in stream for x in step.logprobs]
        assert chances[0].log_prob > -50.0
        for token, _ in chances[0].top:
            assert "yes".startswith(python_tiny.detokenize([token])) or "no".startswith(
                python_tiny.detokenize([token])
            )


def test_a_constraint_that_cannot_go_on_ends_its_answer_with_an_error(
    python_tiny: Decoder,
) -> None:
    (a,) = python_tiny.tokenize("a", add_special=False)
    bad = python_tiny.stream("x = ", regex="b?a", logit_bias={a: -float("inf")})
    good = python_tiny.stream("x = ", regex="[a-f]{5}")
    assert re.fullmatch("[a-f]{5}", "".join(step.text for step in good))
    with pytest.raises((Error, ValueError), match="no token"):
        list(bad)


def test_a_decoder_without_a_tokenizer_refuses_constraints(tmp_path: Path) -> None:
    with dflash_gguf.load(write_small(tmp_path / "x.gguf", "llama", "f32"), n_ctx=64) as decoder:
        bare = Decoder(decoder.sequence, None)
        with pytest.raises(ValueError, match="regex: the model file has no tokenizer"):
            bare.generate([1, 2], DecodeConfig(regex="a"))


def test_preempted_and_interrupted_answers_keep_their_constraints(python_tiny: Decoder) -> None:
    """Four answers in a context for two, whose batches fail at random after each of their calls."""
    cases = [CONSTRAINTS[name] for name in ("schema", "gbnf", "lark", "regex")]
    prompts = [f"# {number}\nvalue = " for number in range(len(cases))]
    settings: dict[str, Any] = {"max_tokens": 70, "temperature": 0.9, "seed": 3}
    right = [
        python_tiny.generate(prompt, draft="none", **settings, **constraint).tokens
        for prompt, (constraint, _) in zip(prompts, cases, strict=True)
    ]
    rng, n_failed = random.Random(1), 0
    with dflash_gguf.load("python-tiny", n_ctx=192, n_threads=1, n_parallel=4) as decoder:

        def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                nonlocal n_failed
                found = call(*arguments)
                if rng.random() < 0.1:
                    n_failed += 1
                    raise InterruptedError
                return found

            return run

        for name in ("run", "sample", "commit"):
            setattr(decoder.engine, name, faulty(getattr(decoder.engine, name)))
        for draft in ("none", "tree", "auto"):
            states = [
                decoder.add_request(decoder.request(prompt, draft=draft, **settings, **constraint))
                for prompt, (constraint, _) in zip(prompts, cases, strict=True)
            ]
            while not all(state.is_finished for state in states):
                with contextlib.suppress(InterruptedError):
                    decoder.step()
            assert [state.result().tokens for state in states] == right
            assert [state.error for state in states] == [None] * len(states)
    assert n_failed > 20


EXCEEDING = (
    r"start: /[a-z]{2,5}\([^%]*([se][^%]{40}|[aio][^%]{41})*/",
    "root ::= s\ns ::= s s | [a-z ]",
    'root ::= "(" s\ns ::= s s | [a-m ] | [n-z_]',
    "root ::= [a-z ] root | [a-z ]",
)


@pytest.mark.parametrize("grammar", EXCEEDING)
def test_drafts_do_not_change_where_an_answer_exceeds_the_limits(
    python_tiny: Decoder, monkeypatch: pytest.MonkeyPatch, grammar: str
) -> None:
    monkeypatch.setattr(compiler_module, "LEXER_STATES", 500)
    limits = compiler_module._limits(40, 1_000_000), compiler_module._limits(120, 50_000)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)

    def answer(**settings: Any) -> tuple[list[int], str]:
        stream, tokens = python_tiny.stream("def ", grammar=grammar, **settings), list[int]()
        try:
            for step in stream:
                tokens += step.tokens
        except (Error, ConstraintError) as error:
            return tokens, str(error)
        return tokens, ""

    n_exceeded = 0
    for seed, temperature in enumerate((0.0, 0.7, 0.9, 1.3)):
        settings: dict[str, Any] = {"seed": seed, "temperature": temperature, "max_tokens": 90}
        plain = answer(draft="none", **settings)
        n_exceeded += bool(plain[1])
        for draft in DRAFTS:
            assert answer(**settings, **draft) == plain
    assert n_exceeded > 1


def test_time_drops_candidates_and_changes_no_text(
    python_tiny: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, _ = CONSTRAINTS["regex"]
    common: dict[str, Any] = {**settings, "seed": 3, "temperature": 0.9, "max_tokens": N_ANSWER}
    right = python_tiny.generate("x = ", draft="none", **common)
    for seconds in (0.0, 0.00002, 0.0002):
        monkeypatch.setattr(matcher_module, "MAX_DRAFT_S", seconds)
        for draft in DRAFTS:
            found = python_tiny.generate("x = ", **common, **draft)
            assert found.tokens == right.tokens
            assert seconds or not found.n_drafted
