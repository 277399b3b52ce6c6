"""Constraints: masks compared with a brute-force definition, reasoning, limits and bad input."""

from __future__ import annotations

import json
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import vocabularies
from vocabularies import byte_level, gemma, sentence_piece

from dflash_gguf.config import Constraint, DecodeConfig
from dflash_gguf.constraints import compiler as compiler_module
from dflash_gguf.constraints.compiler import CompiledConstraint, ConstraintCompiler
from dflash_gguf.constraints.errors import ConstraintError
from dflash_gguf.constraints.matcher import AnswerConstraint
from dflash_gguf.speculative.tree import Tree
from dflash_gguf.text.reasoning import Format
from dflash_gguf.text.tokenizer import Tokenizer
from dflash_gguf.text.tools.input_grammar import InputGrammar

N_PADDING = 5
"""Ids of a model beyond the tokenizer's."""
VOCABULARIES = {"gpt2": byte_level, "llama": sentence_piece, "gemma4": gemma}
THINK = ["<think>", "</think>", "<", "\n\n", "}\n"]


@pytest.fixture
def tokenizer_of(tmp_path: Path) -> Iterator[Callable[[str], Tokenizer]]:
    opened: list[Tokenizer] = []

    def open_(kind: str) -> Tokenizer:
        path = vocabularies.write(tmp_path / f"{kind}.gguf", VOCABULARIES[kind]())
        tokenizer = Tokenizer.from_file(path)
        assert tokenizer is not None
        opened.append(tokenizer)
        return tokenizer

    yield open_
    for tokenizer in opened:
        tokenizer.close()


@pytest.fixture
def tokenizer(tokenizer_of: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_of("gpt2")


def compiled(tokenizer: Tokenizer, **settings: Any) -> CompiledConstraint:
    constraint = DecodeConfig(**settings).constraint
    assert constraint is not None
    return ConstraintCompiler(tokenizer, tokenizer.n_tokens + N_PADDING).compile(constraint)


def tokens_of(mask: np.ndarray[Any, Any]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def one_mask(constraint: AnswerConstraint) -> set[int]:
    return tokens_of(constraint.masks(Tree.of([-1]))[1][0])


def random_tree(rng: random.Random, n: int, token: Callable[[], int]) -> Tree:
    parents, taken = [-1], set[tuple[int, int]]()
    tokens = [-1]
    for _ in range(n):
        key = rng.randrange(len(tokens)), token()
        if key not in taken:
            taken.add(key)
            parents.append(key[0])
            tokens.append(key[1])
    return Tree.of(tokens, parents)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_masks_of_finite_languages_are_those_of_brute_force(
    tokenizer_of: Callable[[str], Tokenizer], kind: str
) -> None:
    tokenizer, rng, n_partial = tokenizer_of(kind), random.Random(7), 0
    pieces = [tokenizer.piece(token) for token in range(tokenizer.n_tokens)]
    for _ in range(12):
        words = {"".join(rng.choices("ab ", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 9))}
        texts = [word.encode() for word in words]
        grammar = " | ".join(json.dumps(word) for word in words)
        made = compiled(tokenizer, grammar=rng.choice(["root ::= ", "start: "]) + grammar)
        waiting = [((), AnswerConstraint(made))]
        while waiting:
            path, constraint = waiting.pop()
            text = b"".join(pieces[token] for token in path)
            behind = [x[len(text) :] for x in texts if x.startswith(text)]
            right = {t for t, x in enumerate(pieces) if x and any(y.startswith(x) for y in behind)}
            right |= tokenizer.stop_tokens if b"" in behind else set()
            found = one_mask(constraint)
            if found != right:  # tokens of a text without alternative must be the tokenizer's own
                assert len(found) == 1
                assert found < right
                (token,) = found
                assert all(x.startswith(pieces[token]) for x in behind)
                assert constraint.forced(Tree.of([-1]), 1).tokens == [-1, token]
                n_partial += 1
            if len(path) < 4:
                for token in found - tokenizer.stop_tokens:
                    after = AnswerConstraint(made)
                    after.advance([*path, token])
                    waiting.append(((*path, token), after))
    assert n_partial or kind == "gpt2"


CONSTRAINTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"json_schema": {"properties": {"hello": {"enum": ["he", "hell", 5]}}, "required": ["hello"]}},
    {"grammar": 'root ::= "hell" [a-z]* | "hello " w*\nw ::= "w" | " w"'},
    {"regex": "(hello|he|w)+[0-9]{0,3}"},
]


@pytest.mark.parametrize("settings", CONSTRAINTS, ids=lambda x: next(iter(x)))
@pytest.mark.parametrize("kind", VOCABULARIES)
def test_masks_of_trees_are_those_of_their_paths(
    tokenizer_of: Callable[[str], Tokenizer], kind: str, settings: dict[str, Any]
) -> None:
    tokenizer, rng = tokenizer_of(kind), random.Random(3)
    made = compiled(tokenizer, **settings)
    n_vocab = tokenizer.n_tokens + N_PADDING
    likely = tokenizer.tokenize('{"hello": "hell", 5 w } hehe', add_special=False)
    likely += [*tokenizer.stop_tokens]
    constraint, answer = AnswerConstraint(made), list[int]()

    def token() -> int:
        return rng.choice(likely) if rng.random() < 0.8 else rng.randrange(n_vocab)

    for _ in range(15):
        tree = random_tree(rng, 12, token)
        _, masks = constraint.masks(tree)
        assert constraint.error is None
        kept = constraint.allowed(tree)
        paths = {0: list[int]()}
        for node in range(1, len(tree)):
            parent, last = tree.parents[node], tree.tokens[node]
            has_ended = tree.tokens[parent] in tokenizer.stop_tokens
            if parent in paths and not has_ended and last in tokens_of(masks[parent]):
                paths[node] = [*paths[parent], last]
        assert sorted(map(tuple, paths.values())) == sorted(map(tuple, paths_of(kept)))
        for node, path in paths.items():
            if not path or path[-1] not in tokenizer.stop_tokens:
                fresh = AnswerConstraint(made)
                fresh.advance([*answer, *path])
                assert one_mask(fresh) == tokens_of(masks[node])
        found = sorted(one_mask(constraint) - tokenizer.stop_tokens)
        if not found:
            break
        answer.append(rng.choice(found))
        constraint.advance(answer)
    assert answer


def test_a_mask_is_not_that_of_a_path_that_was_tried_before(tokenizer: Tokenizer) -> None:
    made = compiled(tokenizer, grammar='start: "x" ("a" /[h-w]+/ "1" | "b" /[h-w]+/ "2")')
    x, a, b, w, one, two = (tokenizer.tokenize(t, add_special=False)[0] for t in "xabw12")
    constraint = AnswerConstraint(made)
    constraint.advance([x])
    _, masks = constraint.masks(Tree.of([x, a, w, b, w], [-1, 0, 1, 0, 3]))
    assert {one, two} & tokens_of(masks[2]) == {one}
    assert {one, two} & tokens_of(masks[4]) == {two}
    constraint.masks(Tree.of([x, a, w]))
    constraint.advance([x, b, w])
    assert {one, two} & one_mask(constraint) == {two}


def test_forced_tokens_follow_every_node(tokenizer: Tokenizer) -> None:
    made = compiled(tokenizer, regex="[xy](hello|w9{5})z?")
    x, y, h, w, nine, z = (tokenizer.tokenize(t, add_special=False)[0] for t in "xyhw9z")
    constraint = AnswerConstraint(made)
    assert constraint.forced(Tree.of([-1]), 9).tokens == [-1]
    tree = Tree.of([-1, x, y, w, h, nine], [-1, 0, 0, 1, 2, 3])
    for depth in range(4, 12):
        found = constraint.forced(tree, depth)
        assert found.tokens[: len(tree)] == tree.tokens
        assert max(found.depths) == min(depth, 7)
        assert constraint.allowed(found) is found
        texts = {tokenizer.detokenize(path) for path in paths_of(found)}
        assert "xw" + "9" * (depth - 2 if depth < 7 else 5) in texts
    # The answer may end behind a forced path, or at a drafted token that ends answers.
    stop = min(tokenizer.stop_tokens)
    path = [-1, y, *tokenizer.tokenize("hello", add_special=False), z, stop]
    assert constraint.forced(Tree.of(path), 20).tokens == path
    assert one_mask(constraint)


def paths_of(tree: Tree) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append([] if parent < 0 else [*paths[parent], token])
    return paths


def think_tokenizer(tmp_path: Path) -> Tokenizer:
    values = byte_level()
    tokens = values["tokenizer.ggml.tokens"]
    tokens += ["<think>", "</think>", "ĊĊ", ">{"]
    values["tokenizer.ggml.token_type"] += [1, 1, 1, 1]
    tokenizer = Tokenizer.from_file(vocabularies.write(tmp_path / "think.gguf", values))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("is_open", [True, False])
def test_reasoning_is_free_and_may_always_end(tmp_path: Path, is_open: bool) -> None:
    tokenizer = think_tokenizer(tmp_path)
    n = tokenizer.n_tokens
    opening, closing, lines, straddling = range(n - 4, n)
    schema = {"type": "object"}
    made = compiled(tokenizer, json_schema=schema)
    constraint = AnswerConstraint(made, Format("think", is_open))
    text = {t: tokenizer.piece(t) for t in range(n)}
    answer = list[int]()
    if not is_open:
        found = {text[t] for t in one_mask(constraint)}
        assert found == {b"{", b"<", b"<think>"}
        answer.append(opening)
    constraint.advance(answer)
    free = set(range(n + N_PADDING)) - tokenizer.stop_tokens
    assert one_mask(constraint) == free
    answer += tokenizer.tokenize("he {hello", add_special=False)
    constraint.advance(answer)
    assert one_mask(constraint) == free
    spelled = tokenizer.tokenize("</think", add_special=False)
    assert len(spelled) > 1
    other = AnswerConstraint(made, Format("think", is_open))
    other.advance([*answer, *spelled])
    assert one_mask(other) == free - {straddling}
    other.advance([*answer, *spelled, *tokenizer.tokenize(">", add_special=False)])
    spaces = {t for t, piece in text.items() if piece and not piece.strip(b" \t\r\n")}
    start = {t for t, piece in text.items() if piece == b"{"}
    assert one_mask(other) == start | spaces
    # The whole round in one tree: the end of reasoning, white space, the start of the answer.
    (brace,) = start
    quote = next(t for t, piece in text.items() if piece == b'"')
    tree = Tree.of(
        [-1, closing, lines, brace, quote, lines, lines, brace], [-1, 0, 1, 2, 3, 2, 5, 2]
    )
    masks = [tokens_of(mask) for mask in constraint.masks(tree)[1]]
    assert masks[0] == free
    assert masks[1] == masks[2] == start | spaces
    assert {text[t] for t in masks[3]} > {b'"', b"}", b" "}
    assert masks[5] == start
    kept = constraint.allowed(tree)
    assert kept.tokens == [-1, closing, lines, brace, quote, lines, brace]
    constraint.advance([*answer, closing, brace, quote])
    assert opening not in one_mask(constraint) or text[opening].isascii()


def test_an_answer_may_begin_with_the_mark_token_by_token(tmp_path: Path) -> None:
    tokenizer = think_tokenizer(tmp_path)
    text = {t: tokenizer.piece(t) for t in range(tokenizer.n_tokens)}
    constraint = AnswerConstraint(compiled(tokenizer, regex="[a-z]{3}"), Format("think"))
    tokens = tokenizer.tokenize("<thi", add_special=False)
    constraint.advance(tokens)
    assert {text[t] for t in one_mask(constraint)} == {b"n"}
    constraint.advance([*tokens, *tokenizer.tokenize("nk>", add_special=False)])
    assert len(one_mask(constraint)) > 200
    answer = AnswerConstraint(compiled(tokenizer, regex="[a-z]{3}"), Format("think"))
    answer.advance(tokenizer.tokenize("a", add_special=False))
    assert all(text[t].isalpha() for t in one_mask(answer))


def test_harmony_constrains_the_final_message_alone(tmp_path: Path) -> None:
    values = byte_level()
    marks = ["<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>"]
    values["tokenizer.ggml.tokens"] += marks
    values["tokenizer.ggml.token_type"] += [1] * len(marks)
    tokenizer = Tokenizer.from_file(vocabularies.write(tmp_path / "harmony.gguf", values))
    assert tokenizer is not None
    n = tokenizer.n_tokens
    channel, message, end, start = range(n - 4, n)

    def ids(text: str) -> list[int]:
        return tokenizer.tokenize(text, add_special=False)

    constraint = AnswerConstraint(compiled(tokenizer, regex="he"), Format("harmony"))
    free = set(range(n + N_PADDING)) - tokenizer.stop_tokens
    answer = [channel, *ids("analysis"), message, *ids("hm"), end, start, *ids("assistant")]
    constraint.advance(answer)
    assert one_mask(constraint) == free
    constraint.advance([*answer, channel, *ids("final"), message])
    assert one_mask(constraint) == set(ids("he"))
    call = AnswerConstraint(compiled(tokenizer, regex="he"), Format("harmony"))
    call.advance([channel, *ids("commentary to=functions.f"), message])
    assert one_mask(call) == free


STRICT = {"type": "json_schema"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": "{"}, "json_schema: is not valid JSON: "),
    ({"json_schema": "5"}, "json_schema: must be an object"),
    ({"json_schema": False}, "json_schema: no text satisfies it"),
    ({"json_schema": {"type": "strin"}}, "json_schema: Invalid type: strin"),
    ({"json_schema": {"enum": []}}, "json_schema: Unsatisfiable schema"),
    ({"json_schema": {"pattern": "(?=a)b", "type": "string"}}, "json_schema: regex parse error"),
    ({"json_schema": {"$ref": "http://x/y"}}, "json_schema: Resource 'http://x/y' is not present"),
    ({"grammar": "root ::= other"}, "grammar: Rule 'other' not found"),
    ({"grammar": "a ::= b"}, "grammar: "),
    ({"grammar": "start: ("}, r"grammar: line 1, column \d+: "),
    ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "grammar: "),
    ({"regex": "a("}, "regex: invalid regex .*unclosed group"),
    ({"regex": "a" * 70000}, "regex has 70000 bytes, the limit is 65536"),
    ({"grammar": 'start: "' + "a" * 140000 + '"'}, "grammar has 140009 bytes, the limit is 131072"),
    ({"grammar": "start: %json " + '{"a": ' * 5001}, "grammar: it has 5001 parts"),
    (
        {"json_schema": {"properties": {f"p{i}": {} for i in range(5000)}}},
        "json_schema: it has 5002 parts .*, the limit is 5000",
    ),
    ({"grammar": "start: A & B\nA: /a+/\nB: /b*/"}, "grammar: it has the operator &, which is not"),
    ({"grammar": 'start: ~("a" | /b/)'}, "grammar: it has the operator ~, which is not supported"),
    ({"grammar": 'root ::= "a"\n' * 501}, "grammar: it has 501 rules, the limit is 500 in GBNF"),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {**x, "strict": True}}},
            f"response_format: .*{name}",
        )
        for name, x in {
            "not": {"schema": {"not": {"type": "string"}}},
            "uniqueItems": {"schema": {"type": "array", "uniqueItems": True}},
            "if": {"schema": {"if": {}, "then": {}}},
            "foo": {"schema": {"type": "string", "format": "foo"}},
        }.items()
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=[x[1] for x in BAD])
def test_bad_constraints_are_refused_by_a_sentence(
    tokenizer: Tokenizer, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        compiled(tokenizer, **settings)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_keywords_that_cannot_be_enforced_are_named(tokenizer: Tokenizer) -> None:
    with pytest.warns(UserWarning, match="json_schema is not enforced in full: .*uniqueItems"):
        made = compiled(tokenizer, json_schema={"type": "array", "uniqueItems": True})
    assert {tokenizer.piece(t) for t in one_mask(AnswerConstraint(made))} == {b"["}
    lenient = '{"type": "array", "uniqueItems": true, "x-guidance": {"lenient": true}}'
    with pytest.warns(UserWarning, match="grammar is not enforced in full: .*uniqueItems"):
        compiled(tokenizer, grammar=f"start: %json {lenient}")


def bombs() -> dict[str, dict[str, Any]]:
    chain = "\n".join(["start: r0", *(f'r{i}: r{i + 1} r{i + 1} | "x"' for i in range(4000))])
    refs: dict[str, Any] = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(15000)}
    refs["d15000"] = {"type": "string"}
    nested: dict[str, Any] = {"type": "string"}
    for i in range(14):
        nested = {"anyOf": [{"properties": {f"a{i}": nested}}, {"items": nested}]}
    return {
        "enum": {"json_schema": {"enum": [f"value {i}" for i in range(20000)]}},
        "rules": {"grammar": chain + '\nr4000: "y"'},
        "references": {"json_schema": {"$defs": refs, "$ref": "#/$defs/d0"}},
        "nested": {"json_schema": nested},
        "properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(20000)}}},
        "repeats": {"regex": "(((a|b)*c){0,1000}d){0,1000}"},
        "multiple": {"json_schema": {"type": "integer", "multipleOf": 1234567, "minimum": 3}},
        "multiples": {"json_schema": {"items": {"multipleOf": 99991, "type": "integer"}}},
        "names": {"json_schema": {"required": [f"p{i}" for i in range(60000)]}},
        "booleans": {"json_schema": {"properties": {f"p{i}": True for i in range(40000)}}},
        "values": {"json_schema": {"const": list(range(100000))}},
        "lists": {"json_schema": {"enum": [[i] for i in range(100000)]}},
    }


@pytest.mark.parametrize("name", bombs())
def test_large_constraints_take_a_second_or_are_refused(tokenizer: Tokenizer, name: str) -> None:
    started = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            constraint = AnswerConstraint(compiled(tokenizer, **bombs()[name]))
    except ValueError as error:
        assert name not in ("enum", "repeats")
        print(name, error)
    else:
        assert one_mask(constraint)
    seconds = time.process_time() - started
    print(f"{name}: {seconds:.2f} s")
    assert seconds < 4.0  # a second of an idle machine


@pytest.mark.parametrize(
    "settings",
    [
        {"grammar": 'start: ("return" | "word7" | /[ -~]/ | /\\n/)+'},
        {"json_schema": {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}},
        {"grammar": "root ::= " + " | ".join(f'"{i}"' for i in range(4000))},
    ],
    ids=["letters", "properties", "alternatives"],
)
def test_large_constraints_can_be_used(tokenizer: Tokenizer, settings: dict[str, Any]) -> None:
    constraint, rng = AnswerConstraint(compiled(tokenizer, **settings)), random.Random(1)
    answer: list[int] = []
    for _ in range(5):
        constraint.advance(answer)
        found = one_mask(constraint) - tokenizer.stop_tokens
        assert found or answer
        if not found:
            break
        answer.append(rng.choice(sorted(found)))
    assert constraint.error is None


def narrow(n_in_row: int, n_items: int) -> Any:
    return compiler_module._limits(n_in_row, n_items)


def test_a_candidate_beyond_the_limits_is_dropped_and_its_token_ends_the_answer(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "LIMITS", (narrow(30, 9999),))
    rules = [f'r{i}: "x" r{i} "z" | "y{i}"' for i in range(20)]
    many = " | ".join(f"r{i}" for i in range(20))
    grammar = "\n".join(['start: "a" "c"+ | "b" many', f"many: {many}", *rules])
    made = compiled(tokenizer, grammar=grammar)
    constraint = AnswerConstraint(made)
    (a,), (b,), (c,) = (tokenizer.tokenize(x, add_special=False) for x in "abc")
    tree, masks = constraint.masks(Tree.of([-1, a, c, b, c], [-1, 0, 1, 0, 2]))
    assert tree == Tree.of([-1, a, c, c], [-1, 0, 1, 2])
    found = [tokens_of(mask) for mask in masks]
    assert found == [{a, b}, {c}, {c} | tokenizer.stop_tokens, {c} | tokenizer.stop_tokens]
    assert constraint.error is None
    tree, masks = constraint.masks(Tree.of([-1, a]))
    assert len(tree) == len(masks) == 1
    with pytest.raises(ConstraintError, match="Current row has 61 items"):
        constraint.advance([b])


AMBIGUOUS = {
    "sums": 'root ::= s\ns ::= s s | s s s | "a"',
    "letters": "root ::= s\ns ::= s s | [a-m] | [n-z]",
    "words": "root ::= s\ns ::= s word | word\nword ::= [a-z] word | [a-z]",
    "right": "root ::= [a-z] root | [a-z] root | [a-z]",
}


def some_answer(made: CompiledConstraint, n: int, stops: frozenset[int]) -> list[int]:
    """Returns a random answer of at most n tokens that a constraint allows."""
    constraint, rng, answer = AnswerConstraint(made), random.Random(1), list[int]()
    while len(answer) < n and (options := sorted(one_mask(constraint) - stops)):
        answer.append(rng.choice(options))
        constraint.advance(answer)
    return answer


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_answers_exceed_limits_at_the_same_token_with_and_without_drafts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Trees of the answer's next tokens and of others, of which some exceed the limits first."""
    monkeypatch.setattr(compiler_module, "LIMITS", (narrow(10_000, 1_000_000),))
    stops = tokenizer.stop_tokens
    answer = some_answer(compiled(tokenizer, grammar=AMBIGUOUS[name]), 120, stops)
    monkeypatch.setattr(compiler_module, "LIMITS", (narrow(25, 5000), narrow(70, 900)))
    made = compiled(tokenizer, grammar=AMBIGUOUS[name])
    ends = set[tuple[int, str]]()
    for seed in range(10):
        constraint, rng, n = AnswerConstraint(made), random.Random(seed), 0
        try:
            while n < len(answer):
                constraint.advance(answer[:n])
                ahead = answer[n : n + rng.randrange(8)] if seed else []
                others = [rng.choice(answer) for _ in range(3)] if seed else []
                tokens = [answer[n - 1], *ahead, *others]
                tree = Tree.of(tokens, [-1, *(rng.randrange(x) for x in range(1, len(tokens)))])
                if seed % 2:
                    tree = Tree.of(tokens[: len(ahead) + 1])
                tree = constraint.forced(constraint.allowed(tree), 9)
                tree, masks = constraint.masks(tree)
                if constraint.error is not None:
                    raise ConstraintError(constraint.error)
                node: int | None = 0
                while node is not None and n < len(answer):
                    assert answer[n] in tokens_of(masks[node])
                    node, n = tree.child(node, answer[n]), n + 1
        except ConstraintError as error:
            ends.add((n, str(error)))
    print(name, len(answer), ends)
    assert len(ends) == 1
    assert 0 < min(ends)[0] < len(answer)


def test_constraints_are_compiled_once(tokenizer: Tokenizer) -> None:
    cache = ConstraintCompiler(tokenizer, tokenizer.n_tokens)
    constraint = Constraint("regex", "a+", True, "regex")
    assert cache.compile(constraint) is cache.compile(constraint)


def test_settings_that_contradict_constraints_are_refused() -> None:
    with pytest.raises(ValueError, match="json_schema and regex are given; leave out all but one"):
        DecodeConfig(json_schema={}, regex="a")
    with pytest.raises(ValueError, match="ignore_eos is true, but grammar decides"):
        DecodeConfig(grammar="start: /a/", ignore_eos=True)
    for value, message in (
        ({"type": "xml"}, "type of response_format is 'xml', must be one of text, json_object"),
        ({"type": "json_schema"}, "has the type json_schema, but no schema"),
        ({"type": "json_schema", "json_schema": 5}, "json_schema of response_format is 5, must"),
        ("json", "response_format is 'json', must be an object"),
    ):
        with pytest.raises(ValueError, match=message):
            DecodeConfig(response_format=value)  # type: ignore[arg-type]
    assert DecodeConfig(response_format={"type": "text"}).constraint is None
    schema = {"type": "json_object", "schema": {"type": "array"}}
    assert DecodeConfig(response_format=schema).constraint == Constraint(
        "json_schema", '{"type": "array"}', False, "response_format"
    )


def test_a_long_forced_text_is_tokenized_in_parts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every mask has the next token of the whole text, whose tokens would take long each time."""
    text = "".join(random.Random(1).choice(" abcdeé") for _ in range(3000))
    constraint = AnswerConstraint(compiled(tokenizer, grammar=f'start: "{text}"'))
    answer: list[int] = []
    lengths: list[int] = []
    tokenize = Tokenizer.tokenize

    def counting(self: Tokenizer, part: str, **settings: bool) -> list[int]:
        lengths.append(len(part))
        return tokenize(self, part, **settings)

    monkeypatch.setattr(Tokenizer, "tokenize", counting)
    while found := one_mask(constraint) - tokenizer.stop_tokens:
        (token,) = found
        answer.append(token)
        constraint.advance(answer)
    assert tokenizer.detokenize(answer) == text
    assert answer == tokenize(tokenizer, text, add_special=False, parse_special=False)
    assert len(lengths) > 2
    assert max(lengths) <= 1024


def test_operators_are_refused_in_grammars_and_not_within_texts(tokenizer: Tokenizer) -> None:
    made = compiled(tokenizer, grammar='start: "a&\\"" | /~[;&]b/ // & of\n# ~\n')
    constraint = AnswerConstraint(made)
    a, b = (tokenizer.tokenize(x, add_special=False)[0] for x in "a~")
    assert {a, b} <= one_mask(constraint)


def test_operators_are_refused_in_grammars_of_custom_tools() -> None:
    with pytest.raises(ValueError, match="has the operator &"):
        InputGrammar("lark", "start: A\nA: /a+/ & /b*/").term(is_escaped=False)
    assert InputGrammar("regex", "a&~b").term(is_escaped=False)


def test_a_lexer_that_fails_for_one_answer_serves_the_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of a constraint share a lexer, which stays failed."""
    monkeypatch.setattr(compiler_module, "LEXER_FUEL", 1000)
    monkeypatch.setattr(compiler_module, "LIMITS", (narrow(100, 1000),))
    grammar = 'start: "p" P | "q" "r"*\nP: /[a-z]*a[a-z]{30}x|[a-z]*e[a-z]{30}y|[a-z]*i[a-z]{30}z/'
    made = compiled(tokenizer, grammar=grammar)
    p, q, r = (tokenizer.tokenize(x, add_special=False)[0] for x in "pqr")
    bad, good, answer = AnswerConstraint(made), AnswerConstraint(made), [p]
    letters = tokenizer.tokenize("aeiouaiaeaieoiaeeiao", add_special=False)
    while bad.error is None:
        bad.advance(answer)
        one_mask(bad)
        answer.append(letters[len(answer)])
    assert "too many expressions" in str(bad.error)
    good.advance([q, r])
    assert one_mask(good) == {r} | tokenizer.stop_tokens
    assert good.error is None
