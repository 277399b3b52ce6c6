"""A meter of prose: the share of comments that begin with a word which has no meaning by itself.

A docstring or a comment block counts as vague if its first word is a pronoun, a preposition or a
conjunction, and as a noun clause if a relative clause stands for a noun ("what is kept").
`python tests/unit/test_prose.py SEED` prints comments for a reader who has not seen the code: 150,
at least three of each folder.
"""

from __future__ import annotations

import ast
import io
import itertools
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("convert", "csrc", "dflash_gguf", "scripts")
FEWEST = 25
"""A folder with fewer comments counts with its parent."""
MOST_VAGUE, MOST_VAGUE_OF_FOLDER, MOST_CLAUSES = 8.0, 12.0, 8.0
"""Percent of the comments of all folders and of each, and noun clauses of each."""
VAGUE = re.compile(
    r"\W*("
    r"also|although|and|another|as|at|because|before|behind|beside|besides|"
    r"beyond|but|by|either|else|for|from|he|her|him|his|how|in|into|it|its|"
    r"itself|neither|nor|of|on|one|ones|only|or|other|others|our|ours|so|"
    r"such|than|that|their|theirs|them|then|there|these|they|this|those|"
    r"though|to|under|unless|until|upon|us|we|what|whatever|when|whenever|"
    r"where|wherever|whether|which|while|who|whoever|whom|whose|with|within|"
    r"without"
    r")\b",
    re.IGNORECASE,
)
CLAUSE = re.compile(
    r"\b(what (is|was|are|were|it|they|its|no|a|an|the)|who(so)?ever|whatever|that which"
    r"|those (that|who|which)|(of|by|for|with|from|to) (what|whom))\b",
    re.IGNORECASE,
)


def python_comments(text: str) -> Iterator[str]:
    """Docstrings, attribute docstrings, and blocks of comment lines."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str(doc))):
                yield doc
    block, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:)", token.string):
            line = token.string.lstrip("#!: ")
            if token.start[0] == last + 1 and block:
                block += " " + line
            else:
                if block:
                    yield block
                block = line
            last = token.start[0]
    if block:
        yield block


def c_comments(text: str) -> Iterator[str]:
    """Blocks of `//` lines, and `/* */` comments other than names of parameters."""
    text = re.sub(r"} // namespace.*|/\*\w+( =)?\*/", "", text)
    for comment in re.findall(r"/\*(.*?)\*/", text, re.DOTALL):
        yield re.sub(r"\n\s*\*?", " ", comment)
    for block in re.findall(r"(?://[^\n]*(?:\n[ \t]*(?=//))?)+", text):
        yield re.sub(r"\s*//+\s*", " ", block)


def comments() -> dict[str, list[str]]:
    """All comments by folder; those of small folders stand with the parent's."""
    found: dict[str, list[str]] = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", ".h", ".cpp"} and "__pycache__" not in path.parts:
            read = python_comments if path.suffix == ".py" else c_comments
            texts = [x.strip() for x in read(path.read_text(encoding="utf-8"))]
            found.setdefault(path.parent.relative_to(ROOT).as_posix(), []).extend(
                x for x in texts if re.match(r"\W*[A-Za-z]{2}", x)
            )
    for folder in sorted(found, key=lambda x: -x.count("/")):
        if "/" in folder and len(found[folder]) < FEWEST:
            found.setdefault(folder.rpartition("/")[0], []).extend(found.pop(folder))
    return found


def figures(texts: list[str]) -> tuple[float, float]:
    """Percent of vague beginnings, and of noun clauses."""
    n_vague = sum(VAGUE.match(x) is not None for x in texts)
    n_clauses = sum(CLAUSE.search(x) is not None for x in texts)
    return round(100 * n_vague / len(texts), 1), round(100 * n_clauses / len(texts), 1)


COMMENTS = comments()


def test_few_comments_begin_vaguely() -> None:
    vague, clauses = figures(list(itertools.chain.from_iterable(COMMENTS.values())))
    assert vague <= MOST_VAGUE
    assert clauses <= MOST_CLAUSES


@pytest.mark.parametrize("folder", COMMENTS)
def test_few_comments_of_a_folder_begin_vaguely(folder: str) -> None:
    vague, clauses = figures(COMMENTS[folder])
    assert vague <= MOST_VAGUE_OF_FOLDER
    assert clauses <= MOST_CLAUSES


def draw(seed: str, n: int = 150, n_each: int = 3) -> list[tuple[str, str]]:
    """Comments of all folders with their folder's name, n_each of each folder and n in all."""
    rng = random.Random(seed)
    every = {folder: rng.sample(texts, len(texts)) for folder, texts in sorted(COMMENTS.items())}
    first = [(folder, text) for folder, texts in every.items() for text in texts[:n_each]]
    others = [(folder, text) for folder, texts in every.items() for text in texts[n_each:]]
    return first + rng.sample(others, n - len(first))


if __name__ == "__main__":
    for number, (folder, text) in enumerate(draw(sys.argv[1]), 1):
        print(f"{number}. {folder}: {' '.join(text.split())}")
