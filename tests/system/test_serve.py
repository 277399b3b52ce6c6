"""Routes and fields of dflash-serve, with the bundled pair."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from serving import CODE, ROUTES, TEMPLATE, USER, Served, text_of, tiny

import dflash_gguf
from dflash_gguf import bundled

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}],
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("--metrics", "--alias", "small,python", "--tags", "code")
    yield found
    found.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[dflash_gguf.Decoder]:
    found = bundled.find("python-tiny")
    with dflash_gguf.load(found.target, drafter=found.drafter, n_threads=1) as loaded:
        yield loaded


def body(path: str, **more: Any) -> dict[str, Any]:
    return ({"messages": USER} if "chat" in path else {"prompt": CODE}) | {"max_tokens": 24} | more


def joined(events: list[Any]) -> str:
    text = ""
    for event in events:
        for choice in event.get("choices", [event]):
            part = choice.get("delta", choice)
            text += part.get("content") or part.get("text") or ""
    return text


def plain(decoder: dflash_gguf.Decoder, path: str, **settings: Any) -> dflash_gguf.Result:
    """Answers `body(path)` without server and drafts."""
    decoder.reset()
    settings = {"max_tokens": 24, "draft": "none"} | settings
    if "chat" in path:
        return decoder.chat(USER, template=TEMPLATE, **settings)
    return decoder.generate(CODE, **settings)


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("path", ["/completion", "/chat/completions", "/completions"])
def test_answers_are_those_of_the_decoder_streamed_or_not(
    served: Served, decoder: dflash_gguf.Decoder, prefix: str, path: str
) -> None:
    wanted = plain(decoder, path).text
    assert text_of(served.answer(prefix + path, **body(path))) == wanted
    assert joined(served.events(prefix + path, **body(path))) == wanted


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.9, "seed": 5},
        {"temperature": 1.2, "seed": -9, "top_k": 7, "top_p": 0.8, "min_p": 0.01},
        {"repeat_penalty": 1.3, "repeat_last_n": 32, "presence_penalty": 0.5},
        {"frequency_penalty": 0.7, "temperature": 0.5, "seed": 1},
        {"ignore_eos": True},
        {"stop": ["return", "\n\n"]},
    ],
    ids=str,
)
def test_every_setting_gives_what_plain_decoding_gives(
    served: Served, decoder: dflash_gguf.Decoder, path: str, settings: dict[str, Any]
) -> None:
    wanted = plain(decoder, path, **settings).text
    for draft in ("none", "auto", "chain", "tree"):
        assert text_of(served.answer(path, **body(path, draft=draft, **settings))) == wanted


def test_a_stream_of_chat_has_a_role_then_words_then_a_reason_then_the_counts(
    served: Served,
) -> None:
    events = served.events(ROUTES[2], **body(ROUTES[2], stream_options={"include_usage": True}))
    first, *words, last, counts = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "timings" not in first
    assert all(event["choices"][0]["finish_reason"] is None for event in words)
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert last["timings"]["predicted_n"] == 24
    assert counts["choices"] == []
    assert counts["usage"]["completion_tokens"] == 24
    assert {event["id"] for event in events} == {first["id"]}
    assert first["object"] == "chat.completion.chunk"
    assert first["model"] == "python"


def test_tokens_that_were_drafted_have_the_log_probabilities_of_plain_decoding(
    served: Served, decoder: dflash_gguf.Decoder
) -> None:
    settings = {"temperature": 0.8, "seed": 3, "ignore_eos": True, "max_tokens": 40}
    answers = {}
    for draft in ("none", "chain", "tree", "auto"):
        found = served.answer("/completion", prompt=CODE, n_probs=5, draft=draft, **settings)
        answers[draft] = found["completion_probabilities"]
        if draft in ("chain", "tree"):
            assert found["timings"]["draft_n_accepted"] > 5
    assert all(found == answers["none"] for found in answers.values())
    tokens = [entry["id"] for entry in answers["none"]]
    prompt = decoder.tokenize(CODE)
    rows = decoder.logits([*prompt, *tokens])[len(prompt) - 1 : -1].astype(float)
    for row, entry in zip(rows, answers["none"], strict=True):
        row = row - row.max()
        row -= math.log(sum(map(math.exp, row)))
        assert entry["logprob"] == pytest.approx(row[entry["id"]], abs=2e-3)
        assert [top["id"] for top in entry["top_logprobs"]] == (-row).argsort()[:5].tolist()
    assert any(entry["logprob"] < -0.5 for entry in answers["none"])


def test_log_probabilities_of_a_stream_are_those_of_the_whole(served: Served) -> None:
    settings = body(ROUTES[2], logprobs=True, top_logprobs=2, draft="tree")
    whole = served.answer(ROUTES[2], **settings)["choices"][0]["logprobs"]["content"]
    streamed = []
    for event in served.events(ROUTES[2], **settings):
        streamed += (event["choices"][0].get("logprobs") or {}).get("content", [])
    assert streamed == whole
    assert len(whole) == 24
    assert bytes(whole[0]["bytes"]).decode() == whole[0]["token"]


def test_probabilities_after_sampling_are_what_the_draw_chose_from(served: Served) -> None:
    settings = {"n_probs": 10, "post_sampling_probs": True, "max_tokens": 8, "prompt": CODE}
    greedy = served.answer("/completion", **settings)["completion_probabilities"]
    assert all(e["prob"] == 1.0 and len(e["top_probs"]) == 1 for e in greedy)
    drawn = served.answer("/completion", temperature=1.5, top_k=3, top_p=1, min_p=0, **settings)
    for entry in drawn["completion_probabilities"]:
        logprobs = [top["prob"] for top in entry["top_probs"]]
        assert len(logprobs) == 3
        assert sum(logprobs) == pytest.approx(1.0)
        assert entry["prob"] in logprobs
        assert min(logprobs) > 0


def test_echoed_prompts_have_the_log_probabilities_of_answers(served: Served) -> None:
    """As lm-eval asks: each prompt as token ids, one token more than needed, echo."""
    prompt = served.answer("/tokenize", content=CODE, add_special=True)["tokens"]
    plain = served.answer(
        "/v1/completions", prompt=prompt, max_tokens=6, logprobs=1, return_tokens=True
    )
    answer = plain["choices"][0]
    longer = [*prompt, *answer["tokens"]]
    found = served.answer(
        "/v1/completions",
        prompt=[longer, prompt],
        max_tokens=1,
        logprobs=1,
        echo=True,
        temperature=0,
        seed=1234,
    )
    for choice, tokens in zip(found["choices"], (longer, prompt), strict=True):
        logprobs = choice["logprobs"]
        n = len(tokens) + 1
        assert [len(logprobs[x]) for x in ("tokens", "token_logprobs", "top_logprobs")] == [n] * 3
        assert logprobs["token_logprobs"][0] is None
        assert "".join(logprobs["tokens"]) == choice["text"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert choice["text"][offset : offset + len(token)] == token
    echoed = found["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][len(prompt) : -1] == answer["logprobs"]["token_logprobs"]
    assert echoed["top_logprobs"][len(prompt) : -1] == answer["logprobs"]["top_logprobs"]
    silent = served.answer("/v1/completions", prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    assert len(silent["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    body = {"prompt": prompt, "logprobs": 1, "echo": True, "stream": True}
    assert "leave out stream" in served.post("/v1/completions", body).json()["error"]["message"]


def test_completions_have_their_own_form_of_log_probabilities(served: Served) -> None:
    found = served.answer("/v1/completions", prompt=CODE, max_tokens=6, logprobs=2, echo=False)
    logprobs = found["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == found["choices"][0]["text"]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])


def test_biases_ban_and_force_tokens_by_id_or_text(served: Served) -> None:
    best = served.answer("/completion", prompt=CODE, max_tokens=1, return_tokens=True)["tokens"][0]
    for bias in ([[best, False]], {str(best): -100}, [[best, -1e9]]):
        other = served.answer(
            "/completion", prompt=CODE, max_tokens=8, logit_bias=bias, return_tokens=True
        )
        assert best not in other["tokens"], bias
    forced = served.answer(
        "/completion", prompt=CODE, max_tokens=3, logit_bias={" x": 100}, draft="tree"
    )
    ids = served.answer("/tokenize", content=" x")["tokens"]
    assert forced["generation_settings"]["logit_bias"] == [
        {"bias": 100.0, "token": token} for token in dict.fromkeys(ids)
    ]
    if len(ids) == 1:
        assert forced["content"] == " x x x"


def test_n_answers_have_seeds_of_their_own(served: Served) -> None:
    found = served.answer(ROUTES[2], **body(ROUTES[2], n=3, temperature=1.0, seed=7))
    texts = [choice["message"]["content"] for choice in found["choices"]]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert found["usage"]["completion_tokens"] == 72
    for nth, text in enumerate(texts):
        alone = served.answer(ROUTES[2], **body(ROUTES[2], temperature=1.0, seed=7 + nth))
        assert alone["choices"][0]["message"]["content"] == text
    events = served.events(ROUTES[2], **body(ROUTES[2], n=3, temperature=1.0, seed=7))
    for nth, text in enumerate(texts):
        own = [e for e in events if e["choices"] and e["choices"][0]["index"] == nth]
        assert joined(own) == text


def test_prompts_are_texts_ids_mixtures_and_lists_of_them(served: Served) -> None:
    ids = served.answer("/tokenize", content=CODE, add_special=True)["tokens"]
    wanted = served.answer("/completion", prompt=CODE, max_tokens=8)["content"]
    assert served.answer("/completion", prompt=ids, max_tokens=8)["content"] == wanted
    mixed = [*ids[:2], served.answer("/detokenize", tokens=ids[2:])["content"]]
    for prompt in (mixed, {"prompt_string": CODE}):
        assert served.answer("/completion", prompt=prompt, max_tokens=8)["content"] == wanted
    many = served.answer("/completion", prompt=[CODE, ids, {"prompt_string": CODE}], max_tokens=8)
    assert [one["content"] for one in many] == [wanted] * 3
    found = served.answer("/v1/completions", prompt=[CODE, ids], n=2, max_tokens=8)
    assert [choice["text"] for choice in found["choices"]] == [wanted] * 4
    assert found["usage"]["prompt_tokens"] == 2 * len(ids)


def test_the_native_answer_says_everything(served: Served) -> None:
    found = served.answer(
        "/completion", prompt=CODE, n_predict=6, return_tokens=True, stop=["zzz"], ignore_eos=True
    )
    ids = served.answer("/tokenize", content=CODE, add_special=True)["tokens"]
    assert (found["stop"], found["stop_type"], found["truncated"]) == (True, "limit", False)
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (6, len(ids))
    assert len(found["tokens"]) == 6
    assert found["prompt"].endswith(CODE)
    assert found["has_new_line"] is ("\n" in found["content"])
    settings = found["generation_settings"]
    assert (settings["n_predict"], settings["stop"]) == (6, ["zzz"])
    assert settings["logit_bias"]
    assert all(entry["bias"] is None for entry in settings["logit_bias"])
    select_fields = served.answer(
        "/completion",
        prompt=CODE,
        n_predict=2,
        response_fields=["content", "timings/predicted_n", "no/such"],
    )
    assert select_fields.keys() == {"content", "timings/predicted_n"}
    events = served.events("/completion", prompt=CODE, n_predict=6, n_probs=1)
    assert [len(event["tokens"]) for event in events] == [1] * 6 + [0]
    assert [event["stop"] for event in events] == [False] * 6 + [True]
    assert all(len(event["completion_probabilities"]) == 1 for event in events[:-1])


@pytest.mark.parametrize("path", ROUTES)
def test_a_repeated_prompt_computes_one_token(served: Served, path: str) -> None:
    served.answer(path, **body(path))
    found = served.answer(path, **body(path))
    assert found["timings"]["prompt_n"] == 1
    n_cached = found["timings"]["cache_n"]
    assert n_cached > 3
    if "usage" in found:
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == n_cached
    fresh = served.answer(path, **body(path, cache_prompt=False))
    assert (fresh["timings"]["cache_n"], fresh["timings"]["prompt_n"]) == (0, n_cached + 1)
    assert text_of(fresh) == text_of(found)


def test_progress_is_told_before_any_work_and_for_every_batch(served: Served) -> None:
    prompt = [7] * 700
    served.answer("/completion", prompt=[9, 9], n_predict=1)
    events = served.events("/completion", prompt=prompt, n_predict=2, return_progress=True)
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert told[0]["processed"] == told[0]["cache"] == 0
    assert told[0]["time_ms"] == 0
    assert told[-1]["processed"] == told[-1]["total"] == 700
    first = next(event for event in events if "prompt_progress" in event)["timings"]
    assert all(value == 0 for value in first.values())


@pytest.mark.parametrize("n", [1, 8])
def test_timings_are_numbers_and_rates_leave_out_the_first_token(served: Served, n: int) -> None:
    for path in ROUTES:
        found = served.answer(path, **body(path, max_tokens=n))
        timings = found["timings"]
        assert all(value >= 0 for value in timings.values())
        rate = 1e3 * (n - 1) / timings["predicted_ms"] if n > 1 else 0
        assert timings["predicted_per_second"] == pytest.approx(rate, rel=1e-9)
        assert found["dflash"]["rounds"] <= n
        assert found["dflash"]["ms_by_phase"]
        assert found["dflash"]["phase_ms"]["host"] == found["dflash"]["ms_by_phase"]["overhead"]


def test_timings_come_with_every_token_if_asked_for(served: Served) -> None:
    for path in ROUTES:
        events = served.events(path, **body(path, timings_per_token=True, max_tokens=5))
        counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
        assert counts == sorted(counts)
        assert counts[-1] == 5
        assert len(counts) > 1


def test_no_token_may_be_asked_for(served: Served) -> None:
    for path in ROUTES:
        found = served.answer(path, **body(path, max_tokens=0))
        assert text_of(found) == ""
        assert found["timings"]["predicted_n"] == found["timings"]["predicted_per_second"] == 0
        assert joined(served.events(path, **body(path, max_tokens=0))) == ""


def test_the_end_of_the_context_is_a_length_and_no_error(served: Served) -> None:
    n_ctx = served.get("/props").json()["default_generation_settings"]["n_ctx"]
    prompt = ([5, 9] * n_ctx)[: n_ctx - 6]
    found = served.answer("/completion", prompt=prompt, ignore_eos=True, n_predict=-1)
    assert (found["stop_type"], found["truncated"]) == ("limit", True)
    assert found["tokens_predicted"] == 7
    found = served.answer("/v1/completions", prompt=prompt, ignore_eos=True)
    assert found["choices"][0]["finish_reason"] == "length"
    for path in ("/completion", "/v1/completions"):
        for stream in (False, True):
            long = served.post(path, {"prompt": [5] * (n_ctx + 1), "stream": stream})
            assert long.status_code == 400
            error = long.json()["error"]
            assert error["type"] == "exceed_context_size_error"
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_ctx + 1, n_ctx)


def test_a_conversation_can_end_with_the_beginning_of_the_answer(served: Served) -> None:
    begun = [*USER, {"role": "assistant", "content": "add_two("}]
    prompt = served.answer("/apply-template", messages=begun)["prompt"]
    assert prompt.endswith("def add_two(")
    parts = [{"type": "text", "text": text} for text in ("add_", "two(")]
    in_parts = [*USER, {"role": "assistant", "content": parts}]
    prompt_of_parts = served.answer("/apply-template", messages=in_parts)["prompt"]
    assert prompt_of_parts.endswith("def add_\n\ntwo(")
    found = served.answer(ROUTES[2], messages=begun, max_tokens=8)
    assert text_of(found) == served.answer("/completion", prompt=prompt, max_tokens=8)["content"]
    for messages, more in (
        (begun, {"add_generation_prompt": True}),
        ([*begun, begun[-1]], {}),
        (USER, {"continue_final_message": True}),
        (begun, {"continue_final_message": True, "add_generation_prompt": True}),
    ):
        assert served.post(ROUTES[2], {"messages": messages, **more}).status_code == 400


def test_messages_have_parts_and_roles_of_openai(served: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    prompt = served.answer("/apply-template", messages=messages)["prompt"]
    assert prompt == "# system: be\n# user: one\ntwo\ndef "
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    found = served.post(ROUTES[2], {"messages": [{"role": "user", "content": [image]}]})
    assert found.status_code == 400
    assert "image input is not supported" in found.json()["error"]["message"]
    count = served.answer("/chat/completions/input_tokens", messages=messages)["input_tokens"]
    assert count == len(served.answer("/tokenize", content=prompt, add_special=True)["tokens"])


def test_tokens_and_texts(served: Served) -> None:
    vllm = served.answer("/tokenize", prompt=CODE, add_special_tokens=False)
    assert vllm == served.answer("/tokenize", content=CODE)
    text = "héllo = '日本'"
    tokens = served.answer("/tokenize", content=text)["tokens"]
    assert served.answer("/detokenize", tokens=tokens)["content"] == text
    pieces = served.answer("/tokenize", content=text, with_pieces=True)["tokens"]
    assert [entry["id"] for entry in pieces] == tokens
    data = b"".join(
        p["piece"].encode() if isinstance(p["piece"], str) else bytes(p["piece"]) for p in pieces
    )
    assert data.decode() == text


def test_pages_of_other_sites_are_refused(served: Served) -> None:
    """unit/test_pages.py has the rules."""
    page = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    simple = {**page, "Content-Type": "text/plain"}  # sent without a preflight
    for path in ("/completion", "/slots/0?action=erase", "/no-such-route"):
        assert served.post(path, {"prompt": "a"}, headers=simple).status_code == 403
    for path in ("/v1/models", "/props", "/slots", "/metrics"):
        found = served.get(path, headers={"Host": "evil.example"})
        assert found.status_code == 403
        assert "--allowed-hosts" in found.json()["error"]["message"]
        assert "Access-Control-Allow-Origin" not in served.get(path, headers=page).headers
    assert served.get("/health", headers={"Host": "evil.example"}).status_code == 200


def test_what_the_server_says_of_itself(served: Served) -> None:
    assert served.get("/health").json()["status"] == "ok"
    for path in ("/models", "/v1/models"):
        (listed,) = served.get(path).json()["data"]
        assert (listed["id"], listed["aliases"]) == ("python", ["python", "small"])
        assert (listed["tags"], listed["status"]["value"]) == (["code"], "loaded")
    assert served.get("/v1/models/small").json()["id"] == "python"
    assert served.get("/v1/models/other").status_code == 404
    props = served.get("/props").json()
    assert props["model_path"].endswith(".gguf")
    assert "/" not in props["model_path"]
    assert props["chat_template"] == TEMPLATE
    assert props["total_slots"] == 1
    assert props["default_generation_settings"]["params"]["seed"] == (1 << 32) - 1
    (slot,) = served.get("/slots").json()
    assert (slot["is_processing"], slot["n_ctx"]) == (False, 2048)
    assert served.post("/slots/0?action=save").status_code == 501
    assert "__verbose" not in served.answer("/completion", prompt=CODE, n_predict=1)
    found = served.answer("/v1/completions", prompt=CODE, max_tokens=1, verbose=True)
    assert found["__verbose"]["prompt"].endswith(CODE)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/health", None),
        ("/models", None),
        ("/models/python", None),
        ("/props", None),
        ("/slots", None),
        ("/metrics", None),
        ("/tokenize", {"content": CODE}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/apply-template", {"messages": USER}),
        ("/chat/completions/input_tokens", {"messages": USER}),
        ("/chat/completions", {"messages": USER, "max_tokens": 3}),
        ("/completion", {"prompt": CODE, "n_predict": 3}),
    ],
)
def test_routes_are_there_with_and_without_v1(
    served: Served, path: str, body: dict[str, Any] | None
) -> None:
    short, long = (
        served.get(prefix + path) if body is None else served.post(prefix + path, body)
        for prefix in ("", "/v1")
    )
    assert short.status_code == long.status_code == 200
    if path == "/metrics":
        assert short.text == long.text
        return
    changing = ("id", "created", "timings", "dflash", "usage", "last_used")
    a, b = short.json(), long.json()
    for found in (a, b, *a.get("data", ()), *b.get("data", ())) if isinstance(a, dict) else ():
        for name in changing:
            if not name.startswith("id") or "choices" in found:
                found.pop(name, None)
    if isinstance(a, dict) and "tokens_evaluated" in a:
        a, b = a["content"], b["content"]
    assert a == b
    assert served.get(path, params={"x": "1"}).status_code in (200, 405)


def test_metrics_are_the_sums_of_the_timings(served: Served) -> None:
    def values() -> dict[str, float]:
        found = served.get("/metrics")
        assert "Process-Start-Time-Unix" in found.headers
        lines = found.text.splitlines()
        names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        samples = dict(line.split() for line in lines if not line.startswith("#"))
        assert names == samples.keys()
        return {name: float(value) for name, value in samples.items()}

    before = values()
    answers = [served.answer(path, **body(path)) for path in ROUTES]
    after = values()
    for name, key, unit in (
        ("prompt_tokens_total", "prompt_n", 1),
        ("prompt_tokens_cached_total", "cache_n", 1),
        ("tokens_predicted_total", "predicted_n", 1),
        ("tokens_predicted_seconds_total", "predicted_ms", 1e3),
        ("spec_decode_num_draft_tokens_total", "draft_n", 1),
    ):
        told = sum(found["timings"][key] for found in answers) / unit
        gained = after[f"llamacpp:{name}"] - before[f"llamacpp:{name}"]
        assert gained == pytest.approx(told, abs=1e-5), name
    assert after["llamacpp:requests_processing"] == 0
    rounds = sum(found["dflash"]["rounds"] for found in answers)
    assert after["llamacpp:n_decode_total"] - before["llamacpp:n_decode_total"] == rounds
    assert after["llamacpp:n_busy_slots_per_decode"] == 1


def test_passes_are_counted_once_and_prompts_come_in_batches() -> None:
    with closing(tiny("--metrics", "-np", "4", "-c", "1024", "-b", "64")) as served:
        settings = {
            "n": 4,
            "max_tokens": 20,
            "ignore_eos": True,
            "draft": "none",
            "logit_bias": {"5": 1},
        }
        served.answer("/v1/completions", prompt=CODE, **settings)
        assert served.metric("n_busy_slots_per_decode") > 3
        assert served.metric("n_decode_total") == pytest.approx(19, abs=3)
        settings = {"n_predict": 1, "return_progress": True}
        events = served.events("/completion", prompt=[7] * 150, **settings)
        told = [x["prompt_progress"]["processed"] for x in events if "prompt_progress" in x]
        assert told == [0, 64, 128, 150]


@pytest.mark.parametrize(
    ("path", "request_", "sentence"),
    [
        ("/completion", b"{", "not valid JSON"),
        ("/completion", b"\xff\xfe", "not valid JSON"),
        ("/completion", b"[]", "must be a JSON object"),
        ("/completion", b'{"a":' * 5000, "nests too deeply"),
        ("/completion", {"prompt": CODE, "max_tokens": 1.5}, "max_tokens: expected int"),
        ("/completion", {"prompt": CODE, "max_tokens": -5}, "max_tokens is -5"),
        ("/completion", {"prompt": CODE, "temperature": "hot"}, "temperature: expected float"),
        ("/completion", {"prompt": CODE, "temperature": -1}, "temperature is -1"),
        ("/completion", {"prompt": CODE, "top_p": 2}, "top_p is 2"),
        ("/completion", {"prompt": CODE, "stop": [""]}, "stop holds an empty text"),
        ("/completion", {"prompt": CODE, "logit_bias": [[99999, 1]]}, "token id 99999"),
        ("/completion", {"prompt": CODE, "id_slot": 5}, "id_slot is 5"),
        ("/completion", {"prompt": CODE, "n": 0}, "n is 0"),
        ("/completion", {"prompt": CODE, "mirostat": 2}, "mirostat: 2 is not supported"),
        ("/completion", {"prompt": CODE, "grammar": "root ::= x"}, "grammar"),
        ("/completion", {"prompt": CODE, "draft": "maybe"}, "draft is 'maybe'"),
        ("/completion", {"prompt": CODE, "draft_max": 0}, "draft_max is 0"),
        ("/completion", {"prompt": [4096]}, "token id 4096 is outside"),
        ("/completion", {"prompt": [-1]}, "token id -1 is outside"),
        ("/completion", {"prompt": []}, "prompt"),
        ("/completion", {"prompt": [1, None]}, "prompt must be"),
        ("/completion", {}, "prompt is missing"),
        (
            "/completion",
            {"prompt": {"prompt_string": "x", "multimodal_data": ["a"]}},
            "multimodal_data",
        ),
        ("/v1/completions", {"prompt": CODE, "suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": CODE, "logprobs": 50}, "logprobs is 50"),
        (ROUTES[2], {}, "messages"),
        (ROUTES[2], {"messages": []}, "messages is empty"),
        (ROUTES[2], {"messages": [{"content": "x"}]}, "role is missing"),
        (ROUTES[2], {"messages": [{"role": "user"}]}, "content must be"),
        (ROUTES[2], {"messages": [*USER, CALL]}, "ends with tool_calls, which cannot be"),
        (ROUTES[2], {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
        (ROUTES[2], {"messages": USER, "response_format": {"type": "x"}}, "response_format is 'x'"),
        (ROUTES[2], {"messages": USER, "top_logprobs": 3}, "top_logprobs needs logprobs"),
        (ROUTES[2], {"messages": USER, "reasoning_format": "odd"}, "reasoning_format is 'odd'"),
        (ROUTES[2], {"messages": USER, "chat_template_kwargs": {"messages": 1}}, "chat_template"),
        ("/detokenize", {"tokens": [-3]}, "token id -3"),
        ("/tokenize", {"content": 3}, "content must be a text"),
    ],
)
def test_bad_requests_get_one_sentence(
    served: Served, path: str, request_: Any, sentence: str
) -> None:
    found = served.post(path, request_)
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert sentence in error["message"]
    assert (error["code"], "\n" in error["message"]) == (400, False)


@pytest.mark.parametrize("path", ROUTES)
def test_fields_of_other_servers_give_what_plain_decoding_gives(
    served: Served, decoder: dflash_gguf.Decoder, path: str
) -> None:
    stop = plain(decoder, path).tokens[5]
    for given, ours in (
        ({"stop_token_ids": [stop]}, {"stop_token_ids": [stop]}),
        ({"repetition_penalty": 1.5}, {"repeat_penalty": 1.5, "repeat_last_n": decoder.n_ctx}),
    ):
        wanted = plain(decoder, path, **ours)
        assert wanted.n_tokens > 1
        for draft in ("none", "auto", "tree"):
            assert text_of(served.answer(path, **body(path, draft=draft, **given))) == wanted.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_chooses_its_draft_type(served: Served, is_stream: bool) -> None:
    path, texts = ROUTES[2], set()
    for kind in ("dflash", "suffix", ["dflash", "suffix"]):
        found = served.answer(path, **body(path, draft="chain", draft_type=kind))
        texts.add(text_of(found))
        assert found["timings"]["draft_n"] > 0 or kind == "suffix"
    assert len(texts) == 1
    for kind in ("mtp", "", []):
        for draft in ("auto", "none"):
            wanted = body(path, draft=draft, draft_type=kind, stream=is_stream)
            found = served.post(path, wanted)
            assert (found.status_code, "draft_type" in found.text) == (400, True), found.text


def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(served: Served) -> None:
    for path in (*ROUTES, "/tokenize"):
        fields = {"content": "x"} if path == "/tokenize" else body(path)
        for _ in range(2):
            found = served.post(path, fields | {"foo.bar": 1, "mirostat": 0, "stream": True})
            assert "foo.bar" in found.headers["X-Ignored-Fields"].split(", ")
    assert "X-Ignored-Fields" not in served.post(ROUTES[2], body(ROUTES[2])).headers
    assert served.log.count("field foo.bar of a request is unknown") == 1


def test_what_is_not_there(served: Served) -> None:
    assert served.get("/v1/nothing").status_code == 404
    assert served.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert served.get("/completion").status_code == 405
