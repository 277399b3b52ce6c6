"""Rates of a result, and its JSON report."""

from __future__ import annotations

import dataclasses
import json

from dflash_gguf.outputs import Result, Step
from dflash_gguf.sampling.noise import TokenLogprobs
from dflash_gguf.text.reasoning import OutputPart

FIELDS = [
    "text",
    "reasoning",
    "tool_calls",
    "tokens",
    "n_prompt",
    "n_prefilled",
    "n_cached",
    "n_draft_context",
    "n_tokens",
    "n_decoded",
    "n_passes",
    "prefill_s",
    "decode_s",
    "prefill_tokens_per_s",
    "tokens_per_s",
    "rounds",
    "tau",
    "accept_histogram",
    "rounds_by_draft",
    "candidates_by_proposer",
    "by_proposer",
    "ms_by_phase",
    "phase_ms",
    "draft",
    "n_drafted",
    "n_accepted",
    "seed",
    "model",
    "drafter",
    "backend",
    "kernels",
    "drafter_kernels",
    "threads",
    "stop_reason",
    "stop_text",
    "logprobs",
    "prompt_logprobs",
]


def plain_result(**changes: object) -> Result:
    values: dict[str, object] = {
        "tokens": (5, 6, 7),
        "text": "fünf\n",
        "n_prompt": 10,
        "n_prefilled": 10,
        "n_decoded": 2,
        "rounds": 2,
        "prefill_s": 0.5,
        "decode_s": 0.25,
        "stop_reason": "length",
        "draft": "none",
        "seed": 7,
        "seconds_by_phase": {"prefill": 0.5, "decode": 0.2},
    }
    return Result(**(values | changes))  # type: ignore[arg-type]


def test_rates_come_from_counts_and_seconds() -> None:
    result = plain_result()
    assert result.n_tokens == 3
    assert result.prefill_tokens_per_s == 20.0
    assert result.tokens_per_s == 8.0


def test_what_does_not_apply_is_null() -> None:
    report = json.loads(plain_result(n_decoded=0, rounds=0, decode_s=0.0).to_json())
    assert list(report) == FIELDS
    for name in ("tokens_per_s", "tau", "accept_histogram", "drafter", "kernels", "threads"):
        assert report[name] is None


def test_report_is_one_line_of_json_with_all_fields() -> None:
    line = plain_result(model="m.gguf", threads=2, backend="CPU", kernels={"own": 5}).to_json()
    assert "\n" not in line
    report = json.loads(line)
    assert list(report) == FIELDS
    assert report["text"] == "fünf\n"
    assert report["ms_by_phase"] == {"prefill": 500.0, "decode": 200.0}
    assert (report["model"], report["threads"], report["backend"]) == ("m.gguf", 2, "CPU")
    assert report["kernels"] == {"own": 5}


def test_the_report_has_every_field_of_a_result() -> None:
    names = {field.name for field in dataclasses.fields(Result)}
    assert names - set(FIELDS) == {"seconds_by_phase"}  # which is told in milliseconds
    scores = (TokenLogprobs(-0.5, ((3, -0.5),)),)
    report = json.loads(plain_result(stop_text="x", prompt_logprobs=scores).to_json())
    assert report["stop_text"] == "x"
    assert report["prompt_logprobs"] == [{"log_prob": -0.5, "top": [[3, -0.5]]}]


def test_tau_counts_the_targets_own_token() -> None:
    result = plain_result(n_decoded=9, rounds=3, accept_histogram=(0, 1, 1, 1), draft="chain")
    assert result.tau == 3.0
    assert json.loads(result.to_json())["accept_histogram"] == [0, 1, 1, 1]


def test_retired_names_are_told_as_before() -> None:
    phases = {"prefill": 0.5, "select": 0.2, "overhead": 0.1}
    result = plain_result(seconds_by_phase=phases, candidates_by_proposer={"suffix": (3, 2)})
    assert result.phase_s == {"prefill": 0.5, "tree": 0.2, "host": 0.1}
    assert result.by_proposer == {"copy": (3, 2)}
    report = json.loads(result.to_json())
    assert report["phase_ms"] == {"prefill": 500.0, "tree": 200.0, "host": 100.0}
    assert report["ms_by_phase"] == {"prefill": 500.0, "select": 200.0, "overhead": 100.0}
    assert report["by_proposer"] == {"copy": report["candidates_by_proposer"]["suffix"]}


def test_a_step_is_a_value() -> None:
    parts = OutputPart("a"), OutputPart("hm", "reasoning"), OutputPart("b")
    step = Step((1, 2), parts, logprobs=(TokenLogprobs(-0.5),))
    assert (step.text, step.reasoning, step.n_drafted) == ("ab", "hm", 0)
    assert step.chances == step.logprobs


def test_accepted_candidates_come_from_the_histogram() -> None:
    result = plain_result(n_decoded=7, rounds=4, accept_histogram=(2, 1, 1), n_drafted=9)
    assert (result.n_accepted, result.tau) == (3, 1.75)
    report = result.to_dict()
    assert (report["n_drafted"], report["n_accepted"]) == (9, 3)
    assert plain_result().n_accepted == 0
