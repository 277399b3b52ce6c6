"""Split characters and stop strings, for every cut of the input."""

from __future__ import annotations

import random
import time

import pytest

from dflash_gguf.text.stream import StopMatcher, Utf8Stream


def utf8(pieces: list[bytes]) -> list[str]:
    stream = Utf8Stream()
    return [*(stream.push(piece) for piece in pieces), stream.finish()]


def test_an_incomplete_character_waits_for_its_rest() -> None:
    assert utf8([b"a\xe2", b"\x82", b"\xacb"]) == ["a", "", "€b", ""]


def test_an_incomplete_character_at_the_end_is_replaced_only_there() -> None:
    assert utf8([b"ok\xf0\x9f", b"\x98"]) == ["ok", "", "\ufffd"]


def test_bytes_that_are_no_character_are_replaced_at_once() -> None:
    assert utf8([b"a\xffb"]) == ["a\ufffdb", ""]


def test_any_cut_gives_the_text_of_the_whole() -> None:
    rng = random.Random(1)
    for _ in range(300):
        data = bytes(rng.choice(b"a\xe2\x82\xac\xf0\x9f\x98\x80\xff\xc3") for _ in range(12))
        cuts = sorted(rng.sample(range(13), 4))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
        assert "".join(utf8(pieces)) == data.decode("utf-8", "replace")


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    return [*(matcher.push(piece) for piece in pieces), matcher.finish()], matcher.matched


def test_a_possible_beginning_is_held_back() -> None:
    assert run(["END"], ["a E", "N", "X"]) == (["a ", "", "ENX", ""], None)


def test_text_before_a_stop_text_comes_out_and_nothing_after() -> None:
    assert run(["END"], ["a E", "ND b", "c"]) == (["a ", "", "", ""], "END")


def test_a_held_beginning_is_released_at_the_end() -> None:
    assert run(["END"], ["a EN"]) == (["a ", "EN"], None)


def test_without_stop_texts_nothing_is_held() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_overlapping_repeats_are_found() -> None:
    assert run(["aab"], ["aaa", "ab"]) == (["a", "a", ""], "aab")


@pytest.mark.parametrize("stops", [["bcd", "c"], ["ab", "abc"], ["b", "ab"], ["aa"], ["abab"]])
def test_the_answer_does_not_depend_on_the_cuts(stops: list[str]) -> None:
    rng = random.Random(2)
    for _ in range(200):
        text = "".join(rng.choice("abcd") for _ in range(10))
        by_character = run(stops, list(text))
        cut = rng.randrange(11)
        in_two = run(stops, [text[:cut], text[cut:]])
        whole = run(stops, [text])
        assert "".join(by_character[0]) == "".join(in_two[0]) == "".join(whole[0])
        assert by_character[1] == in_two[1] == whole[1]
        if whole[1] is None:
            assert "".join(whole[0]) == text
            assert not any(stop in text for stop in stops)


def defined(stops: list[str], text: str) -> tuple[str, str | None]:
    """Returns the answer and its stop text by definition, trying every end in turn."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_any_stop_texts_and_any_cuts() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        alphabet = rng.choice(["ab", "abc", "a\u00e9 b"])
        stops = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(4)]
        pieces = ["".join(rng.choices(alphabet, k=rng.randint(0, 5))) for _ in range(6)]
        written, matched = run(stops, pieces)
        assert ("".join(written), matched) == defined(stops, "".join(pieces))


def test_long_stop_texts_that_nearly_occur_take_linear_time() -> None:
    spaces = " " * 2000
    stops = [f"{n:02}{spaces}" for n in range(8)] + [spaces + "b"]
    started = time.process_time()
    written, _ = run(stops, [" " * 40] * 500)  # compared end by end: minutes
    assert "".join(written) == " " * 20000
    assert time.process_time() - started < 5
