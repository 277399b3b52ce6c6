"""Compiles constraints for a model's vocabulary, within limits of size and time."""

from __future__ import annotations

import json
import re
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any
from weakref import WeakValueDictionary

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

from .._stack import run_with_stack
from ..config import Constraint
from ..text.tools.grammar_writer import TOOL_MARK
from ..text.tools.input_grammar import refuse_operators
from .errors import sentence
from .vocabulary import ConstraintVocabulary, TokenizerLike

MAX_BYTES = {"json_schema": 1 << 20, "grammar": 1 << 17, "regex": 1 << 16}
"""Most bytes of a constraint, by kind; a constraint that long compiles in about a second."""
MAX_RULES = 500
"""Most rules of a grammar in GBNF: the time of llguidance's converter grows with their square."""
MAX_PARTS = 5000
"""Most parts of a schema: the time of llguidance grows with their square. A part is an object, a
list, a boolean, or an element of a list that is not an `enum`."""
MAX_MULTIPLES = 50_000
"""Largest sum of the digits of each `multipleOf` in a schema, read as a number: the time of
llguidance grows with its square."""
Limits = Sequence[llguidance.LLParserLimits]

LEXER_STATES = 50_000
"""Most states of a constraint's lexer, which take up to 50 MB. A regex that exceeds them does so
with masks of at most 0.15 s, and before LEXER_FUEL, which depends on what the lexer has cached."""
LEXER_FUEL = 4_000_000
"""Most work of the lexer for a mask, 0.05 to 0.3 s."""


def _limits(n_in_row: int, n_items: int) -> llguidance.LLParserLimits:
    """Returns limits of llguidance: items in one row, and those of all rows that a mask adds.

    A row holds the items of its grammar that may follow a text, and in ambiguous grammars more with
    each token. The time of a row grows with the third power of its items, if these are ambiguous.
    """
    return llguidance.LLParserLimits(
        max_items_in_row=n_in_row,
        step_max_items=n_items,
        step_lexer_fuel=LEXER_FUEL,
        max_lexer_states=LEXER_STATES,
        verbose_errors=False,
    )


LIMITS: Limits = _limits(64, 1_000_000), _limits(700, 24_000)
"""Limits of grammars, of which an answer may exceed all but the last, so that a mask takes at most
about 0.1 s. Calls of 25 tools need 26 items in a row and 100 for a mask, llama.cpp's examples 19
and 20,000, and a grammar that lists single letters 8 and 500,000 with 250,000 tokens."""
PLAIN_LIMITS: Limits = (_limits(8_200, 60_000),)
"""Limits of lists of texts, and of schemas of at most MAX_ALTERNATIVES. Their rows have few
ambiguous items: an object of 2,000 optional properties needs 8,000 in a row and 50,000 for a mask,
in 0.1 s."""
MAX_ALTERNATIVES = 32
"""Most alternatives in a schema with PLAIN_LIMITS: elements of `anyOf`, `oneOf` and lists of types,
and patterns of properties."""
LIST_OF_TEXTS = re.compile(r'\s*(?:root *::=|start *:)(?:[\s|]*"(?:[^"\\\n]|\\.)*")*\s*')
"""A grammar of one rule that lists texts, which has PLAIN_LIMITS."""
UNENFORCED = re.compile("Unimplemented keys|Unknown format|oneOf")
"""Errors of llguidance about keywords that a schema that is not strict may lose."""
STACK_BYTES = 1 << 28
"""Stack of the compiler, which recurses for each rule that a rule refers to."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""White space within JSON: a model could go on for ever with white space of any length."""
MAX_CACHED = 32
"""Compiled constraints that are kept; one of a large schema takes some megabytes."""


class CompiledConstraint:
    """A constraint compiled for a vocabulary, under each of some limits."""

    def __init__(
        self,
        vocabulary: ConstraintVocabulary,
        grammar: str,
        limits: Limits,
    ) -> None:
        """Compiles a grammar of llguidance. Errors: ValueError if it exceeds all limits."""
        self.vocabulary = vocabulary
        self._grammar, self._limits = grammar, limits
        self._prototypes: list[llguidance.LLMatcher] = []
        self.renew()

    @property
    def n_levels(self) -> int:
        """Number of limits, the narrowest rows first, that answers can have."""
        return len(self._prototypes)

    @property
    def warnings(self) -> list[str]:
        """Parts of the grammar that llguidance does not enforce, a sentence each."""
        return list(self._prototypes[0].get_grammar_warnings())

    def matcher(self, level: int = 0) -> llguidance.LLMatcher:
        """Returns a matcher at the start of the answer. level: index of its limits."""
        return self._prototypes[level].deep_copy()

    def renew(self) -> None:
        """Compiles the grammar anew; matchers share one lexer, which may fail for all of them."""
        found, why = [], ""
        for limits in self._limits:
            try:
                found.append(self._prototype(limits))
            except ValueError as error:
                why = str(error)
        if not found:
            raise ValueError(why)
        self._prototypes = found

    def _prototype(self, limits: llguidance.LLParserLimits) -> llguidance.LLMatcher:
        """Returns a matcher that has computed its first mask, for which it builds its automata."""
        matcher = llguidance.LLMatcher(
            self.vocabulary.tokenizer, self._grammar, log_level=0, limits=limits
        )
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        after = matcher.deep_copy()
        if any(mask):  # take a token, as the items of a row are counted behind tokens only
            bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
            after.consume_token(int(bits.argmax()))
        if after.is_error():
            raise ValueError(sentence(after.get_error()))
        if not any(mask):
            raise ValueError("no text satisfies it")
        return matcher


class ConstraintCompiler:
    """Compiles constraints and keeps the latest. Threads may share a compiler."""

    def __init__(self, tokenizer: TokenizerLike, n_vocab: int) -> None:
        """Creates a compiler, whose first constraint takes the time to read the vocabulary."""
        self._tokenizer, self._n_vocab = tokenizer, n_vocab
        self._vocabulary: ConstraintVocabulary | None = None
        self._latest: OrderedDict[Constraint, CompiledConstraint] = OrderedDict()
        self._in_use: WeakValueDictionary[Constraint, CompiledConstraint] = WeakValueDictionary()
        self._lock, self._compiling = threading.Lock(), threading.Lock()

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Returns the compiled constraint, at once if it is one of the latest or in use.

        A schema that is not strict is compiled without the keywords that cannot be enforced, with a
        warning that names them.
        Errors: ValueError that names the field for a bad constraint, for one beyond the limits, and
            for a model without a token that ends answers.
        """
        with self._lock:
            found = self._in_use.get(constraint)
        if found is None:
            with self._compiling:
                found = self._in_use.get(constraint) or self._compile(constraint)
        with self._lock:
            self._in_use[constraint] = self._latest[constraint] = found
            self._latest.move_to_end(constraint)
            while len(self._latest) > MAX_CACHED:
                self._latest.popitem(last=False)
        return found

    def _compile(self, constraint: Constraint) -> CompiledConstraint:
        kind, text, is_strict, field = constraint
        if (n := len(text.encode("utf-8", "surrogatepass"))) > MAX_BYTES[kind]:
            raise ValueError(f"{field} has {n} bytes, the limit is {MAX_BYTES[kind]}")
        if not self._tokenizer.stop_tokens:
            raise ValueError(f"{field}: the model has no token that ends an answer")
        if self._vocabulary is None:
            self._vocabulary = ConstraintVocabulary(self._tokenizer, self._n_vocab)
        vocabulary = self._vocabulary
        try:
            compiled = _compiled(vocabulary, constraint, is_lenient=False)
        except ValueError as error:
            if kind != "json_schema" or is_strict or not UNENFORCED.search(str(error)):
                raise ValueError(_refusal(constraint, str(error))) from None
            try:
                compiled = _compiled(vocabulary, constraint, is_lenient=True)
            except ValueError:
                raise ValueError(f"{field}: {error}") from None
            why = sentence("; ".join(compiled.warnings) or str(error))
            warnings.warn(f"{field} is not enforced in full: {why}", stacklevel=2)
        if kind == "grammar" and (lost := compiled.warnings):
            warnings.warn(
                f"{field} is not enforced in full: {sentence('; '.join(lost))}", stacklevel=2
            )
        return compiled


def _refusal(constraint: Constraint, error: str) -> str:
    """Returns the message for a constraint that does not compile.

    Of the grammar of tools, which the client has not written, it names the tool in place of the
    line and column. A regex is given to llguidance within a grammar of one line.
    """
    subject = constraint.field
    place = re.match(r"line (\d+), column \d+: ", error)
    if place and constraint.kind == "regex":
        error = error[place.end() :]
    elif place and subject == "tools":
        lines = constraint.text.split("\n")[: int(place[1])]
        tools = [line[len(TOOL_MARK) :] for line in lines if line.startswith(TOOL_MARK)]
        subject = f"tool {tools[-1]:.80}" if tools else "the schema of the answer"
        error = error[place.end() :]
    if constraint.kind == "json_schema" or constraint.field == "tools":
        error = error.removeprefix("failed to compile JSON schema: ")
        if UNENFORCED.match(error):
            what = error.replace("Unimplemented keys", "keywords that cannot be enforced")
            what = what.split(". Enable")[0]
            error = f"{what}; leave them out or set strict to false"
    return f"{subject}: {error}"


def _compiled(
    vocabulary: ConstraintVocabulary, constraint: Constraint, *, is_lenient: bool
) -> CompiledConstraint:
    def run() -> CompiledConstraint:
        grammar = _grammar(constraint, is_lenient=is_lenient)
        return CompiledConstraint(vocabulary, grammar, _limits_of(constraint))

    try:
        return run_with_stack(run, STACK_BYTES)
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def _limits_of(constraint: Constraint) -> Limits:
    if constraint.kind == "json_schema":
        n = _n_alternatives(json.loads(constraint.text))
        return PLAIN_LIMITS if n <= MAX_ALTERNATIVES else LIMITS[-1:]
    return PLAIN_LIMITS if LIST_OF_TEXTS.fullmatch(constraint.text) else LIMITS


def _grammar(constraint: Constraint, *, is_lenient: bool) -> str:
    kind, text, *_ = constraint
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "grammar":
        is_gbnf = "::=" in text and not is_lark_syntax(text)
        _check_parts(text.count("{"))  # at least the objects of schemas within the grammar
        if constraint.field != "tools" and not is_gbnf:
            refuse_operators(text)
        return llguidance.LLMatcher.grammar_from_lark(_lark(text) if is_gbnf else text)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if schema is False or not isinstance(schema, (dict, bool)):
        raise ValueError("must be an object" if schema is not False else "no text satisfies it")
    _check_parts(_n_parts(schema))
    if (n := sum(_multiples(schema))) > MAX_MULTIPLES:
        raise ValueError(f"its multipleOf add up to {n} (digits), the limit is {MAX_MULTIPLES}")
    return llguidance.LLMatcher.grammar_from_json_schema(
        {} if schema is True else text,
        defaults={"whitespace_pattern": WHITESPACE},
        overrides={"lenient": True} if is_lenient else {},
    )


def _check_parts(n: int) -> None:
    if n > MAX_PARTS:
        raise ValueError(
            f"it has {n} parts (objects, lists and list elements), the limit is {MAX_PARTS}"
        )


def _n_parts(value: Any, *, is_enum: bool = False) -> int:
    """Returns the number of parts of a schema, for which MAX_PARTS says what counts."""
    if isinstance(value, dict):
        return 1 + sum(_n_parts(one, is_enum=name == "enum") for name, one in value.items())
    if isinstance(value, list):
        n_scalars = sum(not isinstance(one, (dict, list)) for one in value)
        inner = sum(_n_parts(one) for one in value if isinstance(one, (dict, list)))
        return 1 + inner + (0 if is_enum else n_scalars)
    return int(isinstance(value, bool))


def _n_alternatives(value: Any) -> int:
    """Returns the number of alternatives of a schema; MAX_ALTERNATIVES says what counts."""
    parts = value.items() if isinstance(value, dict) else ()
    names = "anyOf", "oneOf", "type", "patternProperties"
    n = sum(len(one) for name, one in parts if name in names and isinstance(one, (dict, list)))
    inner = value if isinstance(value, list) else [one for _, one in parts]
    return n + sum(_n_alternatives(one) for one in inner if isinstance(one, (dict, list)))


def _multiples(value: Any) -> Iterator[int]:
    """Yields the digits of every `multipleOf` in a schema as a number."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    for name, one in value.items() if isinstance(value, dict) else ():
        if isinstance(one, (dict, list)):
            yield from _multiples(one)
        elif name == "multipleOf" and isinstance(one, (int, float)):
            yield int("".join(map(str, Decimal(str(one)).normalize().as_tuple().digits)))


def _lark(gbnf: str) -> str:
    """Converts a grammar of llama.cpp's GBNF to Lark."""

    def character(match: re.Match[str]) -> str:  # llguidance's converter spoils these escapes
        digits = match[1] or match[2]
        if digits is None:
            return match[0]
        code = int(digits, 16)
        return f"\\x{code:02X}" if code < 0x80 else chr(code)

    if (n := gbnf.count("::=")) > MAX_RULES:
        raise ValueError(f"it has {n} rules, the limit is {MAX_RULES} in GBNF; write it in Lark")
    pattern = r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)"
    try:
        return gbnf_to_lark(re.sub(pattern, character, gbnf))
    except Exception as error:  # the converter raises its own errors, and bare exceptions
        raise ValueError(sentence(str(error))) from None
