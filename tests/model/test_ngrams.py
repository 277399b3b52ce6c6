"""N-gram tables: lookups compared with a search of all rows, equal texts, files that do not fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import Parts, edited, read_parts, write_parts
from numpy.typing import NDArray
from train import make_ngrams

import dflash_gguf
from dflash_gguf.bundled import DRAFTER, TARGET
from dflash_gguf.memory.plan import Planner
from dflash_gguf.native import Drafter, Engine, Error, LoadConfig, Model, SuffixIndex
from dflash_gguf.train import pieces
from dflash_gguf.train.pieces import StoredAnswer

PROBS = np.linspace(0.05, 0.95, 12, dtype=np.float32)
PROMPTS = ("def mean(values):\n", "class Stack:\n", "import os\n")


def table_of(
    path: Path, rows: NDArray[Any], classes: NDArray[Any], *, is_short: bool = False
) -> Path:
    """Writes a table for the bundled target. rows: [n, 4], in any order; classes: [n]."""
    order = np.lexsort((-classes, rows[:, 2], rows[:, 1], rows[:, 0]))
    parts = Parts("ngram")
    metadata = read_parts(TARGET).metadata
    parts.metadata = {key: x for key, x in metadata.items() if key.startswith("tokenizer.ggml.")}
    kinds = gguf.GGMLQuantizationType
    parts.tensors = {
        "ngram.tokens": (
            rows[order].astype(np.int16 if is_short else np.int32),
            kinds.I16 if is_short else kinds.I32,
        ),
        "ngram.class": (classes[order].astype(np.int8), kinds.I8),
        "ngram.prob": (PROBS, kinds.F32),
    }
    return write_parts(path, parts)


def rows_of_texts(texts: list[list[int]], *, right: bool) -> NDArray[np.int64]:
    """Returns the rows of all runs in texts, where every other follower is wrong unless right."""
    rows = set()
    for tokens in texts:
        for i in range(1, len(tokens)):
            for size in range(1, min(3, i) + 1):
                run = [*reversed(tokens[i - size : i]), -1, -1][:3]
                rows.add((*run, tokens[i] if right or i % 2 else (tokens[i] + 7) % 4096))
    return np.array(sorted(rows))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(str(TARGET))


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tables of the target's greedy and sampled answers, all right and half wrong."""
    with dflash_gguf.load(TARGET, n_ctx=512) as decoder:
        texts = []
        for prompt in PROMPTS:
            for temperature in (0.0, 0.8):
                answer = decoder.generate(
                    prompt, max_tokens=48, temperature=temperature, seed=3, draft="none"
                )
                texts.append([*decoder.tokenize(prompt), *answer.tokens])
    folder = tmp_path_factory.mktemp("tables")
    paths = {}
    for name, right in (("right", True), ("half", False)):
        rows = rows_of_texts(texts, right=right)
        path = folder / f"{name}.gguf"
        paths[name] = table_of(path, rows, np.full(len(rows), 10), is_short=right)
    return paths


@pytest.mark.parametrize("seed", range(4))
def test_lookups_are_those_of_a_search(tmp_path: Path, model: Model, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_kinds = 3 if seed % 2 else 12
    runs = rng.integers(0, n_kinds, (60, 3))
    runs[rng.random(60) < 0.5, 2] = -1
    runs[(rng.random(60) < 0.3) & (runs[:, 2] < 0), 1] = -1
    rows = np.unique(np.concatenate([runs, rng.integers(0, n_kinds, (60, 1))], axis=1), axis=0)
    classes = rng.integers(0, 12, len(rows))
    file = table_of(tmp_path / "t.gguf", rows, classes, is_short=seed >= 2)
    table = Drafter(str(file), model)
    n_found = 0
    for _ in range(200):
        text = rng.integers(0, n_kinds, int(rng.integers(1, 6))).tolist()
        expected: dict[int, int] = {}
        for size in (1, 2, 3):
            run = [*reversed(text[-size:]), -1, -1][:3]
            found = (rows[:, :3] == run).all(axis=1) if len(text) >= size else []
            if np.any(found):
                best = sorted(zip(-classes[found], rows[found, 3], strict=True))[:4]
                expected = {int(token): -int(negative) for negative, token in best}
        index = SuffixIndex(100, table)
        if index.append([4001, *text]) == 0:  # the text itself has no continuation to propose
            tokens, parents, _, logs = index.propose(1, 16)
            assert set(parents[1:]) <= {0}
            shown = dict(zip(tokens[1:], logs[1:], strict=True))
            assert set(shown) == set(expected)
            for token, prob_class in expected.items():
                assert math.exp(shown[token]) == pytest.approx(PROBS[prob_class], rel=1e-5)
            n_found += bool(expected)
    assert n_found > 20


def test_probabilities_follow_outcomes(tables: dict[str, Path], model: Model) -> None:
    row = read_parts(tables["half"]).tensors["ngram.tokens"][0][0]
    index = SuffixIndex(1000, Drafter(str(tables["half"]), model))
    before = index.outcomes[-12:][10].copy()
    for _ in range(40):
        index.append([int(row[0])])
        index.append([4095], is_chosen=True)
    tried, accepted = index.outcomes[-12:][10]
    assert accepted / tried < 0.7 * before[1] / before[0]


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with penalties": {"repeat_penalty": 1.3, "frequency_penalty": 0.2},
    "sampled": {"temperature": 0.8, "seed": 3},
    "from all tokens": {"temperature": 1.0, "seed": 3, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "pattern": {"regex": "[a-z_ \\n():.=]+"},
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture(scope="module", params=["right", "half", "beside DFlash"])
def decoder(
    request: pytest.FixtureRequest, tables: dict[str, Path]
) -> Iterator[dflash_gguf.Decoder]:
    files = [tables[request.param]] if request.param in tables else [DRAFTER, tables["right"]]
    with dflash_gguf.load(TARGET, drafter=files, n_ctx=1024, n_parallel=4) as loaded:
        assert len(loaded.engine.drafters) == len(files)
        yield loaded


@pytest.mark.parametrize("name", SETTINGS)
def test_texts_are_those_of_plain_decoding(decoder: dflash_gguf.Decoder, name: str) -> None:
    config = {"max_tokens": 48, **SETTINGS[name]}
    n_accepted = 0
    for prompt in PROMPTS:
        plain = decoder.generate(prompt, draft="none", **config)
        decoder.forget_texts()  # else the suffix index copies the plain answer
        for draft in ("auto", "chain", "tree"):
            drafted = decoder.generate(prompt, draft=draft, cache_prompt=False, **config)
            assert drafted.tokens == plain.tokens
            n_accepted += drafted.n_accepted
    assert n_accepted > 0


def test_texts_of_several_sequences_and_prefixes(decoder: dflash_gguf.Decoder) -> None:
    prompts = [*PROMPTS, PROMPTS[0] + "    return "]
    for sampling in ({}, {"temperature": 0.8, "seed": 3}):
        config = {"max_tokens": 40, **sampling}
        plain = [decoder.generate(prompt, draft="none", **config).tokens for prompt in prompts]
        decoder.forget_texts()
        for draft in ("auto", "tree", "auto"):  # later rounds begin from cached prefixes
            results = list(decoder.generate_batch(prompts, draft=draft, **config))
            assert [result.tokens for result in results] == plain
            if draft == "tree":
                assert sum(result.n_accepted for result in results) > 0


def test_the_script_makes_a_table_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with dflash_gguf.load(TARGET, n_ctx=1024) as decoder:
        stored = []
        for i in range(8):
            prompt = decoder.tokenize(f"def f{i}(values):\n")
            answer = decoder.generate(prompt, max_tokens=40, draft="none").tokens
            stored.append(StoredAnswer(i, 0, "code", 0.0, len(prompt), (*prompt, *answer)))
    pieces.save(tmp_path / "a.xz", stored)
    command = ["make_ngrams.py", str(TARGET), str(tmp_path / "t.gguf"), str(tmp_path / "a.xz")]
    monkeypatch.setattr("sys.argv", command)
    assert make_ngrams.main() == 0
    assert "code: 320 tokens, " in capsys.readouterr().out
    tokens = read_parts(tmp_path / "t.gguf").tensors["ngram.tokens"][0]
    counts = Counter[tuple[int, ...]]()
    for x in stored:
        for i in range(x.n_prompt, len(x.tokens)):
            counts[(*x.tokens[i - 3 : i][::-1], x.tokens[i])] += 1
    rows = [tuple(row) for row in tokens.tolist() if min(row) >= 0]
    assert rows
    assert set(rows) <= set(counts)
    best = max(counts, key=lambda row: counts[row])
    assert best in rows
    with dflash_gguf.load(TARGET, drafter=tmp_path / "t.gguf", n_ctx=512) as decoder:
        result = decoder.generate(list(stored[0].tokens[: stored[0].n_prompt]), max_tokens=40)
        assert tuple(result.tokens) == stored[0].tokens[stored[0].n_prompt :]


def test_the_script_takes_answers_shorter_than_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces.save(tmp_path / "a.xz", [StoredAnswer(i, 0, "code", 0.0, 1, (5, 7)) for i in range(8)])
    out = tmp_path / "t.gguf"
    monkeypatch.setattr("sys.argv", ["make_ngrams.py", str(TARGET), str(out), f"{tmp_path}/a.xz"])
    assert make_ngrams.main() == 0
    assert read_parts(out).tensors["ngram.tokens"][0].tolist() == [[5, -1, -1, 7]]


@pytest.mark.parametrize(
    ("out", "answers", "sentence"),
    [
        ("a.xz", "a.xz", "OUT {tmp}/a.xz: is an input too; name another file"),
        ("t.gguf", "b.xz", "the answers have token 60000, {target} has 4096 tokens"),
        ("t.gguf", "c.xz", "1 answers; at least 8 are needed"),
        ("t.gguf", "none.xz", "{tmp}/none.xz: No such file or directory"),
        ("none/t.gguf", "a.xz", "OUT {tmp}/none/t.gguf: "),
    ],
)
def test_the_script_refuses_files_that_do_not_fit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    out: str,
    answers: str,
    sentence: str,
) -> None:
    for name, tokens, n in (("a", (1, 2, 3), 8), ("b", (1, 60000), 8), ("c", (1, 2), 1)):
        stored = [StoredAnswer(i, 0, "code", 0.0, 1, tokens) for i in range(n)]
        pieces.save(tmp_path / f"{name}.xz", stored)
    before = (tmp_path / "a.xz").read_bytes()
    files = [str(tmp_path / name) for name in (out, answers)]
    monkeypatch.setattr("sys.argv", ["make_ngrams.py", str(TARGET), *files])
    assert make_ngrams.main() == 1
    assert sentence.format(tmp=tmp_path, target=TARGET) in capsys.readouterr().err
    assert (tmp_path / "a.xz").read_bytes() == before
    assert not (tmp_path / "t.gguf").exists()


def test_the_plan_counts_a_table(tables: dict[str, Path]) -> None:
    path, config = tables["right"], LoadConfig(n_ctx=512)
    plan, plain = (Planner(TARGET, x, config).plan() for x in (path, None))
    (item,) = (x for x in plan.items if x.name == "drafter weights")
    tensors = read_parts(path).tensors
    assert item.where == "file"
    assert item.bytes == tensors["ngram.tokens"][0].nbytes + tensors["ngram.class"][0].nbytes
    assert [x for x in plan.items if x is not item] == list(plain.items)
    assert Planner(TARGET, path, config).block_size == 0


def _rows(change: Callable[[NDArray[Any]], None]) -> Callable[[Parts], object]:
    def edit(parts: Parts) -> None:
        rows, kind = parts.tensors["ngram.tokens"]
        rows = rows.copy()
        change(rows)
        parts.tensors["ngram.tokens"] = rows, kind

    return edit


def _values(name: str, value: float) -> Callable[[Parts], object]:
    def edit(parts: Parts) -> None:
        values, kind = parts.tensors[name]
        parts.tensors[name] = np.full_like(values, value), kind

    return edit


def _shape(name: str, shape: tuple[int, ...]) -> Callable[[Parts], object]:
    def edit(parts: Parts) -> None:
        values, kind = parts.tensors[name]
        parts.tensors[name] = np.resize(values, shape), kind

    return edit


def _float_tokens(parts: Parts) -> None:
    rows = parts.tensors["ngram.tokens"][0].astype(np.float32)
    parts.tensors["ngram.tokens"] = rows, gguf.GGMLQuantizationType.F32


def _other_token(parts: Parts) -> None:
    tokens = list(parts.metadata["tokenizer.ggml.tokens"][1])
    parts.set("tokenizer.ggml.tokens", [*tokens[:300], "other", *tokens[301:]])


BAD: dict[str, tuple[Callable[[Parts], object], str]] = {
    "unsorted": (
        _rows(lambda rows: rows.__setitem__(slice(0, 2), rows[[-1, 0]])),
        r"row 1 of tensor ngram.tokens is not sorted behind the row before",
    ),
    "follower outside the vocabulary": (
        _rows(lambda rows: rows.__setitem__((5, 3), 4096)),
        r"row 5 of tensor ngram.tokens has token 4096, the target has tokens 0 to 4095",
    ),
    "run outside the vocabulary": (
        _rows(lambda rows: rows.__setitem__((-1, 0), 9999)),
        r"of tensor ngram.tokens has token 9999, the target has tokens 0 to 4095",
    ),
    "no follower": (
        _rows(lambda rows: rows.__setitem__((0, 3), -1)),
        r"row 0 of tensor ngram.tokens has token -1, the target has tokens 0 to 4095",
    ),
    "an id whose 16 bits are a negative number": (
        _rows(lambda rows: rows.__setitem__((0, 3), -2)),
        r"row 0 of tensor ngram.tokens has token 65534, the target has tokens 0 to 4095",
    ),
    "a gap in a run": (
        _rows(lambda rows: rows.__setitem__((0, slice(0, 3)), (rows[0, 0], -1, 3))),
        r"row 0 of tensor ngram.tokens has token 3, the target has",
    ),
    "class": (
        _values("ngram.class", 12),
        r"row 0 of tensor ngram.class has class 12, expected 0 to 11",
    ),
    "probability": (
        _values("ngram.prob", math.nan),
        r"tensor ngram.prob has the probability nan, expected numbers between 0 and 1",
    ),
    "probabilities": (
        _shape("ngram.prob", (5,)),
        r"tensor ngram.prob is f32 \[5, 1\], expected f32 \[12, 1\]",
    ),
    "no probabilities": (
        _shape("ngram.prob", (1, 0)),
        r"tensor ngram.prob is f32 \[0, 1\], expected f32 \[12, 1\]",
    ),
    "classes of too few rows": (
        _shape("ngram.class", (3,)),
        r"tensor ngram.class is i8 .*, expected i8",
    ),
    "runs of four": (
        _shape("ngram.tokens", (4, 5)),
        r"tensor ngram.tokens is i16 \[5, 4\], expected i16 \[4, 4\]",
    ),
    "type": (_float_tokens, r"tensor ngram.tokens is f32 .*, expected i32"),
    "a tensor is missing": (
        lambda parts: parts.tensors.pop("ngram.class"),
        r"tensor ngram.class is missing",
    ),
    "a tensor too many": (
        lambda parts: parts.f32("output.weight", np.zeros((4, 4), np.float32)),
        r"tensor output.weight is not part of architecture ngram",
    ),
    "another tokenizer": (
        _other_token,
        r"its tokenizer.ggml.tokens differs from that of the target .* at entry 300",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_does_not_fit_is_refused(
    tmp_path: Path, tables: dict[str, Path], model: Model, name: str
) -> None:
    edit, sentence = BAD[name]
    file = edited(tables["right"], tmp_path / "bad.gguf", edit)
    with pytest.raises(Error, match=sentence):
        Drafter(str(file), model)


def test_a_truncated_file_is_refused(tmp_path: Path, tables: dict[str, Path], model: Model) -> None:
    data = tables["right"].read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (len(data) - 32, len(data) // 2, 100):
        file.write_bytes(data[:size])
        with pytest.raises(Error, match=r"cut\.gguf"):
            Drafter(str(file), model)


def test_a_table_is_no_target_and_has_no_pass(tables: dict[str, Path], model: Model) -> None:
    with pytest.raises(Error, match='architecture "ngram"'):
        Model(str(tables["right"]))
    engine = Engine(model, 64, Drafter(str(tables["right"]), model))
    assert engine.max_draft == 0
