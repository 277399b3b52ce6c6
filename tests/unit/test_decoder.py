"""Decoder with a fake core: prompts, reuse of the sequence, interruption, chat turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import END, FakeModel, FakeSequence
from vocabularies import byte_level, write

from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Error
from dflash_gguf.text.tokenizer import Tokenizer

COLON = ord(":")


def make(
    tokenizer: Tokenizer | None, script: bytes = b"yes", block_size: int = 1, **model: Any
) -> Decoder:
    fake = FakeModel(**model)
    sequence: Any = FakeSequence(fake, script, COLON, block_size=block_size)
    return Decoder(sequence, tokenizer)


def fed(decoder: Decoder) -> bytes:
    """Returns the tokens computed since the last call, as bytes."""
    sequence: Any = decoder.sequence
    tokens, sequence.fed = sequence.fed, []
    return bytes(tokens)


def test_text_and_token_prompts_give_the_same(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    result = decoder.generate("ab:")
    assert (result.text, result.stop_reason) == ("yes", "token")
    assert (result.model, result.backend, result.threads) == ("fake.gguf", "FAKE", 2)
    assert decoder.generate(np.array([ord("a"), ord("b"), COLON])).tokens == result.tokens


def test_stream_gives_the_same_as_generate(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    stream = decoder.stream("ab:")
    steps = list(stream)
    assert "".join(step.text for step in steps) == "yes" == stream.result().text
    assert [step.tokens for step in steps] == [(ord("y"),), (ord("e"),), (ord("s"),), (END,)]


def test_settings_are_fields_of_the_config(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    assert decoder.generate("ab:", max_tokens=2).text == "ye"
    with pytest.raises(ValueError, match="top_p is 2, must be at most 1"):
        decoder.generate("ab:", top_p=2)
    with pytest.raises(TypeError, match="tempreature"):
        decoder.generate("ab:", tempreature=1)
    with pytest.raises(TypeError, match="did you mean n_probs"):
        decoder.generate("ab:", logprobs=2)
    with pytest.raises(TypeError, match="text is 3, must be a str"):
        decoder.tokenize(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is 64, must be a DecodeConfig"):
        decoder.generate("ab:", 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="enable_thinking is 'no', must be True or False"):
        decoder.chat("ab", template="chatml", enable_thinking="no")  # type: ignore[call-overload]


def test_chat_answers_a_conversation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = make(tokenizer)
    messages = [{"role": "user", "content": "ab"}]
    assert decoder.chat(messages, template="{{ messages[0].content }}:").text == "yes"
    assert fed(decoder) == b"ab:yes"
    template = "{{ messages[0].role }}={{ messages[0].content }}:"
    assert decoder.chat_prompt("ab", template=template) == decoder.tokenize("user=ab:")
    file = tmp_path / "template.jinja"
    file.write_text(template)
    assert decoder.chat_prompt("ab", template=file) == decoder.tokenize("user=ab:")
    with pytest.raises(TypeError, match="not int"):
        decoder.chat("ab", template=5)  # type: ignore[call-overload]
    stream = decoder.chat("ab", template="{{ messages[0].content }}:", stream=True)
    assert "".join(step.text for step in stream) == stream.result().text == "yes"


THINKING = "{{ messages[0].content }}:{# </think> #}"


def test_thoughts_are_no_part_of_the_text(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer, b"<think>\nhm\n</think>\n\nyes", block_size=4)
    messages = [{"role": "user", "content": "ab"}]
    result = decoder.chat(messages, template=THINKING)
    assert (result.text, result.reasoning) == ("yes", "hm")
    raw = decoder.chat(messages, template=THINKING, reasoning_format="none")
    assert (raw.text, raw.reasoning) == ("<think>\nhm\n</think>\n\nyes", None)
    assert raw.tokens == result.tokens
    # Only a prompt from a template has a reasoning format.
    prompt = decoder.chat_prompt(messages, template=THINKING)
    assert decoder.generate(list(prompt)).text == raw.text
    continued = decoder.generate(prompt + decoder.tokenize("", add_special=False))
    assert (continued.text, continued.reasoning) == ("yes", "hm")
    steps = list(decoder.stream(prompt))
    assert "".join(step.reasoning for step in steps) == "hm"
    assert "".join(step.text for step in steps) == "yes"
    cut = decoder.generate(prompt, max_tokens=9)
    assert (cut.text, cut.reasoning, cut.stop_reason) == ("", "h", "length")


def test_a_prompt_is_computed_from_where_it_parts_from_the_last(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    decoder.generate("ab:", draft="none")
    assert fed(decoder) == b"ab:yes"
    result = decoder.generate("ab:yes!:", draft="none")
    assert fed(decoder) == b"!:yes"
    assert (result.text, result.n_prompt, result.n_prefilled) == ("yes", 8, 2)
    decoder.generate("ab:yEs:", draft="none")
    assert fed(decoder) == b"Es:yes"
    decoder.generate("ab:", draft="none")
    assert fed(decoder) == b":yes"
    decoder.reset()
    decoder.generate("ab:", draft="none")
    assert fed(decoder) == b"ab:yes"


SAID = {"role": "user", "content": "x"}


def test_callbacks_cannot_use_their_decoder(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    refused: list[str] = []
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: decoder.generate("cd:"),
        "stream": lambda: decoder.stream("cd:"),
        "chat": lambda: decoder.chat([SAID], template="{{ 'cd:' }}"),
        "logits": lambda: decoder.logits([1]),
        "reset": decoder.reset,
        "close": decoder.close,
        "close of a stream": lambda: stream.close(),
    }

    def callback(*_: int) -> bool:
        for name, call in calls.items():
            with pytest.raises(RuntimeError, match="busy: a callback of its answer cannot use it"):
                call()
            refused.append(name)
        assert decoder.tokenize("a") == [ord("a")]
        return False

    stream = decoder.stream("ab:", on_prefill=callback, cancelled=callback)
    assert "".join(step.text for step in stream) == "yes"
    assert refused
    assert refused == [*calls] * (len(refused) // len(calls))
    assert decoder.generate("ab:yes:").n_prefilled == 1
    assert bytes(decoder.sequence.left) == b"ab:yes:yes"  # type: ignore[attr-defined]


def test_a_timeline_that_others_moved_is_used_as_far_as_it_agrees(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    stream = decoder.stream("ab:")
    decoder.sequence.append(list(b"ab, not what was asked"))  # type: ignore[attr-defined]
    fed(decoder)
    assert [step.text for step in stream] == ["y", "e", "s", ""]
    assert fed(decoder) == b":yes"
    decoder.sequence.append(list(b"more"))  # type: ignore[attr-defined]
    assert decoder.generate("ab:yes:", draft="none").text == "yes"
    assert fed(decoder) == b"more:yes"


def test_a_cancelled_answer_can_be_asked_again(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    result = decoder.generate("ab:", cancelled=lambda: decoder.sequence.position > 3)
    assert (result.text, result.stop_reason) == ("ye", "cancelled")
    assert decoder.generate("ab:").text == "yes"


def test_drafting_gives_the_same_text_and_timeline(tokenizer: Tokenizer) -> None:
    script = b"a longer answer than that"
    for draft in ("none", "chain", "auto"):
        decoder = make(tokenizer, script, block_size=6)
        for _ in range(2):
            result = decoder.generate("ab:", draft=draft)
            assert (result.text, result.draft) == (script.decode(), draft)
            assert bytes(decoder.sequence.left) == b"ab:" + script  # type: ignore[attr-defined]
        assert result.drafter == "fake-drafter.gguf"
        assert result.n_accepted > 0 or draft != "chain"


def test_draft_settings_must_suit_the_drafter(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer, block_size=6)
    longest = decoder.generate("ab:", draft="chain")
    assert decoder.generate("ab:", draft="chain", draft_min=6).n_drafted == longest.n_drafted
    assert decoder.generate("ab:", draft="chain", draft_max=6).n_drafted == longest.n_drafted
    assert decoder.generate("ab:", draft="chain", draft_max=1).n_drafted == 2
    bare = make(tokenizer)
    assert bare.generate("ab:", draft="chain").text == "yes"
    with pytest.raises(ValueError, match=r"draft_type 'dflash' is not available; .* has: suffix"):
        bare.generate("ab:", draft="chain", draft_type="dflash")
    assert (bare.generate("ab:").draft, bare.generate("ab:").drafter) == ("auto", None)


def test_a_refused_prompt_changes_nothing(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    decoder.generate("ab:")
    fed(decoder)
    for prompt, sentence in (
        ("", "the prompt is empty"),
        ("x" * 65, "the prompt has 65 tokens, the context holds 64"),
        ([1, 263], "token id 263 is outside the vocabulary of 263"),
        ([-1], "token id -1 is outside the vocabulary of 263"),
    ):
        with pytest.raises(ValueError, match=sentence):
            decoder.generate(prompt)  # type: ignore[arg-type]
    decoder.generate("ab:")
    assert fed(decoder) == b":yes"


def test_without_tokenizer_only_tokens_are_taken() -> None:
    decoder = make(None)
    result = decoder.generate([ord("a"), COLON], max_tokens=3)
    assert (bytes(result.tokens), result.text) == (b"yes", "")
    for call in (decoder.generate, decoder.tokenize):
        with pytest.raises(ValueError, match="has no tokenizer: give the prompt as token ids"):
            call("a")


def test_rows_beyond_the_tokenizer_have_no_text(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer, n_vocab=300)
    decoder.sequence.script = [ord("a"), 290, ord("b")]  # type: ignore[attr-defined]
    assert decoder.generate("x:", max_tokens=3).text == "ab"


def test_logits_start_from_an_empty_cache(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    decoder.generate("ab:")
    assert decoder.logits([1, 2, 3]).shape == (3, 263)
    assert decoder.sequence.left == [1, 2, 3]  # type: ignore[attr-defined]
    assert decoder.generate("ab:").text == "yes"


def test_a_later_call_ends_a_stream(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    stream = decoder.stream("ab:")
    next(stream)
    assert decoder.generate("cd:").text == "yes"
    with pytest.raises(RuntimeError, match="ended by a later call"):
        next(stream)
    other = decoder.stream("ab:")
    next(other)
    other.close()
    assert list(other) == []
    assert other.result().stop_reason == "cancelled"


def test_threads_take_turns(tokenizer: Tokenizer) -> None:
    decoder = make(tokenizer)
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: texts.append(decoder.generate(f"{i}:").text))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["yes"] * 8


def test_closing_frees_everything_once(tokenizer: Tokenizer) -> None:
    with make(tokenizer) as decoder:
        decoder.generate("ab:")
    decoder.close()
    assert decoder.model.n_closed == 2  # type: ignore[attr-defined]
    with pytest.raises(Error, match="the decoder is closed"):
        decoder.generate("ab:")


READ: dict[str, Any] = {"type": "function", "function": {"name": "read", "parameters": {}}}
MARKED = "\x01"
"""Character at which prompts of the scripted model end."""


def make_calls(tokenizer: Tokenizer, script: bytes) -> Decoder:
    sequence: Any = FakeSequence(FakeModel(), script, ord(MARKED), n_ctx=2048, block_size=8)
    return Decoder(sequence, tokenizer)


@pytest.mark.parametrize("is_parallel", [True, False])
def test_calls_are_the_same_with_and_without_drafts(
    is_parallel: bool, tokenizer: Tokenizer
) -> None:
    call = b'<tool_call>\n{"name": "read", "arguments": {"n": %d}}\n</tool_call>\n'
    script = b"I look.\n" + call % 1 + call % 2
    decoder = make_calls(tokenizer, script)
    results = [
        decoder.chat(
            "Go",
            tools=[READ],
            template="{{ tools | tojson }}" + MARKED,
            draft=draft,
            seed=1,
            parallel_tool_calls=is_parallel,
        )
        for draft in ("none", "chain", "tree", "auto")
    ]
    for result in results:
        assert (result.text, result.tokens) == ("I look.", results[0].tokens)
        assert result.tool_calls == results[0].tool_calls
        assert result.stop_reason == ("token" if is_parallel else "call")
    arguments = [one["function"]["arguments"] for one in results[0].tool_calls]
    assert arguments == ['{"n": 1}', '{"n": 2}'][: 2 if is_parallel else 1]
    assert results[1].n_accepted > 0


@pytest.mark.parametrize(
    ("marks", "said", "found"),
    [
        (("[TOOL_CALLS]", "[ARGS]"), 'Ok.[TOOL_CALLS]read[ARGS]{"n": 1}', ("Ok.", None, ["read"])),
        (("[THINK]", "[/THINK]"), "[THINK]Hm.[/THINK]Yes.", ("Yes.", "Hm.", [])),
    ],
)
def test_marks_that_are_control_tokens_are_read(
    tmp_path: Path, marks: tuple[str, str], said: str, found: tuple[str, str | None, list[str]]
) -> None:
    values = byte_level(add_bos_token=False, bos_token_id=None)
    values["tokenizer.ggml.tokens"][-2:] = marks
    tokenizer = Tokenizer.from_file(write(tmp_path / "m.gguf", values))
    assert tokenizer is not None
    decoder = make_calls(tokenizer, b"")
    sequence: Any = decoder.sequence
    sequence.script = tokenizer.tokenize(said, add_special=False)
    assert len(sequence.script) == len(said) - sum(len(mark) - 1 for mark in marks)
    template = "{{ tools | tojson }}" + f"{{# {' '.join(marks)} #}}" + MARKED
    result = decoder.chat("Go", tools=[READ], template=template)
    names = [call["function"]["name"] for call in result.tool_calls]
    assert (result.text, result.reasoning, names) == found
    # A template that has no marks leaves control tokens out.
    plain = decoder.chat("Go", template="{{ messages[-1].content }}" + MARKED)
    assert plain.text == said.replace(marks[0], "").replace(marks[1], "")


def test_the_next_turn_takes_the_calls_and_their_results(tokenizer: Tokenizer) -> None:
    decoder = make_calls(tokenizer, b'<tool_call>{"name": "read"}</tool_call>')
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    template = (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] "
        "%}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{% endfor %}" + MARKED
    )
    answer = decoder.chat(messages, tools=[READ], template=template)
    (call,) = answer.tool_calls
    messages += [
        {"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls},
        {"role": "tool", "tool_call_id": call["id"], "content": "text"},
    ]
    prompt = decoder.chat_prompt(messages, tools=[READ], template=template)
    assert decoder.detokenize(prompt).endswith(f"Go{call['id']}text{call['id']}{MARKED}")
    assert prompt.tools is not None
    assert prompt.tools.n_earlier == 1


def test_a_file_s_template_for_tools_is_taken(tmp_path: Path) -> None:
    values = byte_level(add_bos_token=False)
    values["tokenizer.chat_template.tool_use"] = "{{ tools | tojson }}[TOOL_CALLS]" + MARKED
    tokenizer = Tokenizer.from_file(write(tmp_path / "t.gguf", values))
    assert tokenizer is not None
    decoder = make_calls(tokenizer, b"")
    found = decoder.chat_prompt("Go", tools=[READ])
    assert found.tools is not None
    assert (found.tools.family, "[TOOL_CALLS]" in decoder.detokenize(found)) == (
        "mistral_list",
        True,
    )
    assert "read" not in decoder.detokenize(decoder.chat_prompt("Go"))


def test_a_template_without_tools_shows_them_in_the_system_message(tokenizer: Tokenizer) -> None:
    decoder = make_calls(tokenizer, b"")
    prompt = decoder.chat_prompt("Go", tools=[READ])
    text = decoder.detokenize(prompt, special=True)
    assert text.startswith("<|im_start|>system\nYou can call")
    assert prompt.tools is not None
    assert prompt.tools.family == "generic"
