"""Prefix files restore what was saved, or are refused with one sentence."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CLASSES
from device import DEVICE
from dflash_gguf.convert.gguf_header import read_header
from pairs import Pair, make_pair, open_decoder, random_tokens

from dflash_gguf import cli
from dflash_gguf.decoder import Decoder
from dflash_gguf.kv_cache import prefix_file
from dflash_gguf.text.chat import ChatPrompt

pytestmark = pytest.mark.skipif(DEVICE is not None, reason="the same bits are the CPU's")

SETTINGS: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.8, "seed": 5}
PROMPT = random_tokens(150, seed=4)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_loaded_prefix_gives_the_tokens_of_a_computed_one(tmp_path: Path, kind: str) -> None:
    pair, path = make_pair(tmp_path, kind), tmp_path / "p.dfl"
    with open_decoder(pair) as decoder:
        expected = decoder.generate(PROMPT, draft="tree", **SETTINGS)
        decoder.reset()
        assert decoder.save_prefix(path, PROMPT[:-1]) == 149
        first = path.read_bytes()
        decoder.generate(PROMPT[:140], **SETTINGS)
        assert decoder.save_prefix(path, PROMPT[:-1]) == 149
        if decoder.engine.partial_prefix_ok:  # others save the snapshots of the last answer too
            assert path.read_bytes() == first
        assert [x.name for x in tmp_path.glob("*.part")] == []
    for n_parallel in (1, 3):
        with open_decoder(pair, n_parallel) as decoder:
            assert decoder.load_prefix(path) == PROMPT[:-1]
            found = decoder.generate(PROMPT, draft="tree", **SETTINGS)
            assert (found.n_cached, found.n_draft_context) == (149, 149)
            assert found.tokens == expected.tokens
            assert found.accept_histogram == expected.accept_histogram
            decoder.reset()
            assert decoder.engine.prefix_bytes == 0


def found_in(decoder: Decoder, texts: list[list[int]]) -> list[int]:
    return [decoder._prefix_cache.match(text).n for text in texts]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_file_serves_what_memory_serves(tmp_path: Path, kind: str) -> None:
    """The same prompt, other turns after a boundary, and longer texts find what memory finds."""
    pair, path = make_pair(tmp_path, kind), tmp_path / "p.dfl"
    chat = ChatPrompt(PROMPT, None, (64, 101))
    with open_decoder(pair) as decoder:
        answer = decoder.generate(chat, **SETTINGS).tokens
        text = [*PROMPT, *answer[:-1]]
        texts = [PROMPT, [*PROMPT[:101], 5, 6], [*PROMPT[:70], 7], [*text, 8, 9], [*text[:-2], 3]]
        in_memory = found_in(decoder, texts)
        assert in_memory[:2] == [149, 101]
        expected = [decoder.generate(text, draft="none", **SETTINGS).tokens for text in texts]
        decoder.reset()
        decoder.generate(chat, **SETTINGS)
        decoder.save_prefix(path, text)
    for draft in ("none", "tree"):
        for text, n, tokens in zip(texts, in_memory, expected, strict=True):
            with open_decoder(pair) as decoder:
                decoder.load_prefix(path)
                assert found_in(decoder, texts) == in_memory
                result = decoder.generate(text, draft=draft, **SETTINGS)
                assert (result.n_cached, result.tokens) == (n, tokens)


@pytest.mark.parametrize("n", [2, 64, 65, 128, 150])
@pytest.mark.parametrize("kind", ["qwen35", "gpt-oss"])
def test_a_computed_file_serves_its_own_text(tmp_path: Path, kind: str, n: int) -> None:
    pair, path = make_pair(tmp_path, kind), tmp_path / "p.dfl"
    with open_decoder(pair) as decoder:
        decoder.save_prefix(path, PROMPT[:n])
        decoder.reset()
        decoder.load_prefix(path)
        assert found_in(decoder, [PROMPT[:n], [*PROMPT[:n], 1]]) == [n - 1, n]
        tokens = decoder.generate(PROMPT[:n], **SETTINGS).tokens
        decoder.reset()
        assert decoder.engine.prefix_bytes == 0
        assert decoder.generate(PROMPT[:n], draft="none", **SETTINGS).tokens == tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"), "qwen35")


@pytest.fixture(scope="module")
def decoder(pair: Pair) -> Iterator[Decoder]:
    with open_decoder(pair) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def saved(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "p.dfl"
    decoder.save_prefix(path, PROMPT)
    return path


def refused(decoder: Decoder, path: Path, sentence: str) -> None:
    decoder.reset()
    with pytest.raises(ValueError, match=sentence):
        decoder.load_prefix(path)
    assert len(decoder._prefix_cache) == 0
    assert decoder.engine.prefix_bytes == 0


def test_damaged_files_are_refused(decoder: Decoder, saved: Path, tmp_path: Path) -> None:
    data, bad = saved.read_bytes(), tmp_path / "bad.dfl"
    names, tensors = zip(*read_header(saved).tensors.items(), strict=True)
    assert len({name.split(".")[0] for name in names}) == 4  # two prefixes, tokens, checksums
    for info in tensors:
        for end in (info.start, info.start + info.n_bytes // 2, info.start + info.n_bytes - 1):
            bad.write_bytes(data[:end])
            refused(decoder, bad, "bad.dfl: ")
        flipped = bytearray(data)
        flipped[info.start + info.n_bytes // 2] ^= 16
        bad.write_bytes(flipped)
        refused(decoder, bad, "bad.dfl: is damaged: .*another checksum")
    head = next(iter(tensors)).start
    for at in range(0, head, 7):
        flipped = bytearray(data)
        flipped[at] ^= 1
        bad.write_bytes(flipped)
        refused(decoder, bad, "bad.dfl: ")
    for end in (data[:-1], data[:-1] + b"1", data + b"\0"):
        bad.write_bytes(end)
        refused(decoder, bad, "bad.dfl: is damaged: ")
    bad.write_bytes(b"")
    refused(decoder, bad, "bad.dfl: ")


def changed(model: Path) -> bytes:
    weights = bytearray(model.read_bytes())
    weights[len(weights) // 2] ^= 1
    return bytes(weights)


def test_what_is_another_s_is_refused(
    pair: Pair, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_pair(tmp_path, "qwen35", seed=5)
    another = tmp_path / "another.gguf"
    another.write_bytes(changed(pair.target))
    with open_decoder(pair) as decoder:
        monkeypatch.setattr(prefix_file, "library_build", lambda: "another")
        refused(decoder, saved, "p.dfl: was made with another build of dflash-gguf or ggml")
        monkeypatch.undo()
        refused(decoder, pair.target, "target.gguf: is not a prefix file")
        with pytest.raises(FileNotFoundError):
            decoder.load_prefix(tmp_path / "none.dfl")
    for target, drafter, sentence in (
        (pair.target, other.drafter, "another drafter"),
        (another, pair.drafter, "another model file"),
    ):
        with open_decoder(Pair(tmp_path, tmp_path, target, drafter)) as decoder:
            refused(decoder, saved, f"p.dfl: was made with {sentence}")
    with open_decoder(pair, cache_type="f16") as decoder:
        refused(decoder, saved, "p.dfl: was made with other types of keys and values")
    with open_decoder(pair, n_bytes=1000) as decoder:
        refused(decoder, saved, r"p.dfl: there is no room for its \d+ bytes; raise cache_ram")
    with open_decoder(pair, n_ctx=100) as decoder:
        refused(decoder, saved, "150 tokens after 0 do not fit into a context of 100")


@pytest.mark.parametrize("file", ["target", "drafter"])
@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_a_prefix_belongs_to_what_was_loaded(
    pair: Pair, tmp_path: Path, file: str, change: str
) -> None:
    files = {"target": tmp_path / "t.gguf", "drafter": tmp_path / "d.gguf"}
    for name, path in files.items():
        shutil.copy(getattr(pair, name), path)
    mine, prefix = Pair(tmp_path, tmp_path, **files), tmp_path / "p.dfl"
    with open_decoder(mine) as decoder:
        files[file].unlink()
        if change == "replaced":
            files[file].write_bytes(changed(getattr(pair, file)))
        decoder.generate(PROMPT[:-1], **SETTINGS)
        decoder.save_prefix(prefix, PROMPT[:-1])
        assert decoder.load_prefix(prefix) == PROMPT[:-1]
    with open_decoder(pair) as decoder:
        assert decoder.load_prefix(prefix) == PROMPT[:-1]
    if change == "replaced":
        with open_decoder(mine) as decoder:
            refused(decoder, prefix, "another (model file|drafter)")


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_nothing(decoder: Decoder, saved: Path, tmp_path: Path) -> None:
    size, path = saved.stat().st_size, tmp_path / "p.dfl"
    path.write_bytes(b"an older file")
    for n_bytes in (0, size // 2, size - 1):
        with full_disk(n_bytes), pytest.raises(OSError, match="File too large"):
            decoder.save_prefix(path, PROMPT)
        assert [x.name for x in tmp_path.iterdir()] == ["p.dfl"]
        assert path.read_bytes() == b"an older file"
    decoder.save_prefix(path, PROMPT)
    assert path.read_bytes() == saved.read_bytes()
    with pytest.raises(FileNotFoundError):
        decoder.save_prefix(tmp_path / "no" / "p.dfl", PROMPT)


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_run_begins_with_its_prompt_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_gguf: Callable[[str], Path], kind: str
) -> None:
    path, model = tmp_path / "run.dfl", tiny_gguf(kind)
    words = ["-m", str(model), "--tokens", ",".join(map(str, PROMPT)), "-n", "8", "-c", "256"]
    answers = []
    for _ in range(2):
        assert cli.main([*words, "--prompt-cache", str(path), "--json"]) == 0
        answers.append(capsys.readouterr())
    found = [json.loads(answer.out) for answer in answers]
    assert [one["n_cached"] for one in found] == [0, 149]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert "run.dfl: 149 tokens of earlier prompts" in answers[1].err
    path.write_bytes(path.read_bytes()[:-40])
    assert cli.main([*words, "--prompt-cache", str(path)]) == 1
    assert "is incomplete" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main(["-m", str(model), "-i", "--prompt-cache", str(path)])
