"""A model in several files runs like the whole file; errors name the bad part."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoints import CLASSES
from dflash_gguf.convert.compare import check
from dflash_gguf.convert.errors import ConvertError
from dflash_gguf.convert.gguf_header import read_parts as read_headers
from dflash_gguf.convert.inspect import inspect
from gguf_files import Parts, edited, make_gguf, split_names, write_split
from pairs import Pair, make_pair, open_pair, random_tokens

from dflash_gguf import load
from dflash_gguf.cli import main
from dflash_gguf.config import LoadConfig
from dflash_gguf.memory.plan import Planner
from dflash_gguf.native import Engine, Error, Model, Sequence
from dflash_gguf.speculative.runtime import CostFile
from dflash_gguf.text.tokenizer import Tokenizer

THREE = (4, 7, 0)
NONE_IN_FIRST = (0, 5, 0)  # as by llama-gguf-split --no-tensor-first-split
TOKENS = [5, 9, 200, 17, 8, 8, 1]


def open_model(path: Path, **settings: bool) -> Model:
    return Model(str(path), LoadConfig(n_ctx=64, n_threads=1, n_gpu_layers=0, **settings))


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("sizes", [THREE, NONE_IN_FIRST])
def test_logits_are_those_of_the_whole_file(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, kind: str, sizes: tuple[int, ...]
) -> None:
    whole = tiny_gguf(kind)
    first = write_split(whole, tmp_path / kind, sizes)
    for repack in (True, False):
        expected, found = (Sequence(Engine(open_model(x, repack=repack))) for x in (whole, first))
        np.testing.assert_array_equal(found.logits(TOKENS), expected.logits(TOKENS))


@pytest.mark.parametrize("repack", [True, False])
def test_quantised_weights_in_parts(tmp_path: Path, repack: bool) -> None:
    whole = make_gguf(tmp_path, "llama", outtype="q8_0", num_hidden_layers=3)
    models = [
        open_model(x, repack=repack) for x in (whole, write_split(whole, tmp_path / "p", (9, 9, 0)))
    ]
    np.testing.assert_array_equal(*(Sequence(Engine(model)).logits(TOKENS) for model in models))
    assert len({tuple(model.kernels.items()) for model in models}) == 1
    plans = [Planner(model.path, None, LoadConfig(n_ctx=64)).plan() for model in models]
    assert plans[0].items == plans[1].items


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen3")


def test_drafter_in_parts(pair: Pair, tmp_path: Path) -> None:
    split = Pair(
        pair.target_dir,
        pair.drafter_dir,
        write_split(pair.target, tmp_path / "target", THREE),
        write_split(pair.drafter, tmp_path / "drafter", (3, 0)),
    )
    drafts = []
    for each in (pair, split):
        sequence = open_pair(each)
        sequence.prefill(random_tokens(20))
        drafts.append(sequence.draft(9, 4, 5))
    for expected, found in zip(*drafts, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_tokenizer_and_answer_are_those_of_the_whole_file(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_split(pair.target, tmp_path / "target", THREE)
    drafter = write_split(pair.drafter, tmp_path / "drafter", (3, 0))
    tokenizers = [Tokenizer.from_file(path) for path in (pair.target, target)]
    assert tokenizers[0] is not None and tokenizers[1] is not None
    assert tokenizers[0].tokenize("a split model") == tokenizers[1].tokenize("a split model")
    answers = []
    for path, draft in ((pair.target, pair.drafter), (target, drafter)):
        with load(path, drafter=draft, n_ctx=128, n_threads=1) as decoder:
            answers.append(list(decoder.generate(TOKENS, max_tokens=24).tokens))
    assert answers[0] == answers[1]
    assert main(["-m", str(target), "-md", str(drafter), "-p", "a", "-n", "4", "-c", "0"]) == 0
    assert capsys.readouterr().out


def damaged(tmp_path: Path, whole: Path, name: str) -> tuple[Path, str]:
    """Damages a split model; returns the path to load and the expected message."""
    first = write_split(whole, tmp_path / "x", THREE)
    _, second, third = split_names(tmp_path / "x", 3)
    if name == "second part given":
        return second, "split.no makes it part 2 of a model in 3 files; give the first, whose name "
    if name == "missing":
        third.unlink()
        return first, f"{third}: part 3 of 3 of {first}: No such file"
    if name == "renamed":
        return first.rename(
            tmp_path / "y.gguf"
        ), "the first of 3 files; its name must end in -00001"
    if name == "swapped":
        shutil.copy(third, second)
        return first, f"{second}: its split.no is 2 and its split.count 3, expected 1 and 3"
    if name == "not a part":
        shutil.copy(whole, second)
        return first, f"{second}: its split.no is -1 and its split.count 1, expected 1 and 3"
    if name == "of two":
        other = write_split(whole, tmp_path / "other", (4, 0))
        shutil.copy(split_names(tmp_path / "other", 2)[1], second)
        assert other.exists()
        return first, f"{second}: its split.no is 1 and its split.count 2, expected 1 and 3"
    if name == "another total":
        longer = make_gguf(tmp_path / "longer", "llama", num_hidden_layers=3)
        write_split(longer, tmp_path / "other", THREE)
        shutil.copy(split_names(tmp_path / "other", 3)[1], second)
        return first, f"{second}: part of another model than {first}: its split.tensors.count is"
    if name == "one tensor fewer":
        write_split(whole, tmp_path / "other", (4, 6, 0))
        shutil.copy(split_names(tmp_path / "other", 3)[1], second)
        return first, f"{first}: its 3 parts hold 20 tensors, split.tensors.count is 21"
    if name == "truncated":
        second.write_bytes(second.read_bytes()[:-64])
        return first, f"{second}: truncated: tensor"
    if name == "no total":
        for part in (first, second, third):
            drop_total(part)
        return first, "split.tensors.count is missing"
    second.write_bytes(b"GGUF" + bytes(100))
    return first, f"{second}: damaged or truncated GGUF header"


def drop_total(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"split.tensors.count", b"split.tensors.counT"))


DAMAGES = (
    *("second part given", "missing", "renamed", "swapped", "not a part", "of two"),
    *("another total", "one tensor fewer", "truncated", "no total", "damaged"),
)


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_amiss_with_a_part_is_named(
    tiny_gguf: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    path, message = damaged(tmp_path, tiny_gguf("llama"), name)
    with pytest.raises(Error) as caught:
        open_model(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_parts(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    first = write_split(tiny_gguf("llama"), tmp_path / "x", (4, 4, 0))
    write_split(tiny_gguf("llama"), tmp_path / "y", (3, 4, 0))
    shutil.copy(split_names(tmp_path / "y", 3)[1], split_names(tmp_path / "x", 3)[1])
    with pytest.raises(Error, match=r"x-00002-of-00003\.gguf: tensor \S+ is also in .*x-00001-of-"):
        open_model(first)
    with pytest.raises(ConvertError, match=r"x-00002-of-00003\.gguf: an earlier part holds"):
        read_headers(first)


def test_one_part_of_one(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    def edit(parts: Parts) -> None:
        parts.metadata["split.no"] = (gguf.GGUFValueType.UINT16, 0, None)
        parts.metadata["split.count"] = (gguf.GGUFValueType.UINT16, 1, None)

    open_model(edited(tiny_gguf("llama"), tmp_path / "any name.gguf", edit))


def test_costs_are_kept_by_every_part(tiny_gguf: Callable[[str], Path], tmp_path: Path) -> None:
    first = write_split(tiny_gguf("llama"), tmp_path / "x", THREE)
    before = CostFile([str(first)])._identity
    assert len([entry for entry in before if "-of-00003.gguf" in entry]) == 3
    last = split_names(tmp_path / "x", 3)[2]
    last.write_bytes(last.read_bytes() + b"x")
    assert CostFile([str(first)])._identity != before


def test_the_converter_inspects_and_checks_all_parts(
    tiny_gguf: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = tiny_gguf("llama")
    checkpoint = whole.parent / "checkpoint"
    first = write_split(whole, tmp_path / "x", THREE)
    report = check(checkpoint, first)
    assert report.ok, str(report)
    assert len(report.tensors) == len(check(checkpoint, whole).tensors)
    text = inspect(first)
    assert text.count("tensor data: complete") == 3
    assert "output_norm.weight" in text
    _, second, third = split_names(tmp_path / "x", 3)
    assert "7 tensors" in inspect(second)
    third.write_bytes(third.read_bytes()[:-64])
    assert "TRUNCATED" in inspect(first)
    with pytest.raises(ConvertError, match=r"x-00003-of-00003\.gguf: tensor data: TRUNCATED"):
        check(checkpoint, first)
    shutil.copy(second, third)
    with pytest.raises(
        ConvertError, match=r"its split\.no is 1 and its split\.count 3, expected 2"
    ):
        check(checkpoint, first)
    third.unlink()
    with pytest.raises(ConvertError, match=r"x-00003-of-00003\.gguf: cannot be read: No such file"):
        inspect(first)
