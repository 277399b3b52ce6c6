"""Requests with different API keys learn nothing of each other's texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import Served, tiny

TEXT = "def the_secret_of_alice(value):\n    return value + 7351\n" * 3
DRAFTS = ("--draft", "chain", "--draft-type", "suffix")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("slots")
    found = tiny("--api-key", "alice,mallory", "--slot-save-path", str(folder), *DRAFTS)
    yield found
    found.close()


def ask(served: Served, key: str, path: str = "/completion", **body: Any) -> Any:
    found = served.post(path, body, headers={"Authorization": f"Bearer {key}"})
    assert found.status_code == 200, found.text
    return found.json()


def complete(served: Served, key: str, text: str = TEXT, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(served, key, prompt=text, n_predict=24, **more)
    timings = found["timings"]
    return {name: timings.get(name, 0) for name in ("prompt_n", "cache_n", "draft_n")} | {
        "content": found["content"]
    }


def test_counts_tell_nothing_of_another_key_s_text(served: Served) -> None:
    first = complete(served, "mallory")
    complete(served, "alice", TEXT + "# her own words")
    for more in ({}, {"cache_prompt": False}):
        # Her second request finds her own first one, and never alice's longer text.
        found = complete(served, "mallory", TEXT + "# her own", **more)
        fresh = complete(served, "mallory", TEXT + "# her own", cache_prompt=False)
        assert found["content"] == fresh["content"]
        assert found["cache_n"] <= first["prompt_n"] * (not more)
    alone = tiny("--api-key", "mallory,bob", *DRAFTS)
    try:
        expected = complete(alone, "mallory", "def the_secret", cache_prompt=False)
    finally:
        alone.close()
    assert complete(served, "mallory", "def the_secret", cache_prompt=False) == expected


def test_a_request_that_must_not_be_cached_leaves_nothing(served: Served) -> None:
    text = "x = [1, 2, 3]\n" * 9
    first = complete(served, "alice", text, cache_prompt=False)
    assert complete(served, "alice", text) == first


def test_slots_show_and_save_a_key_s_own_text(served: Served) -> None:
    complete(served, "alice", stop=["a stop text of alice"], seed=7351)
    headers = {"Authorization": "Bearer mallory"}
    assert "alice" not in served.get("/slots", headers=headers).text
    assert "7351" not in served.get("/slots", headers=headers).text
    saved = ask(served, "alice", "/slots/0?action=save", filename="her.dfl")
    assert saved["n_saved"] > 20
    body = {"filename": "her.dfl"}
    for action in ("restore", "save"):
        found = served.post(f"/slots/0?action={action}", body, headers=headers)
        assert found.status_code == (400 if action == "restore" else 200)
    theirs = ask(served, "mallory", "/slots/0?action=restore", **body)
    mine = ask(served, "alice", "/slots/0?action=restore", **body)
    assert mine["n_restored"] == saved["n_saved"] != theirs["n_restored"]
    assert ask(served, "mallory", "/slots/0?action=erase")["n_erased"] == theirs["n_restored"]
    assert complete(served, "alice", stop=["-"])["prompt_n"] == 1


def test_keys_of_one_person_share_if_told() -> None:
    served = tiny("--api-key", "one,two", "--share-prefixes")
    try:
        n = complete(served, "one")["prompt_n"]
        assert complete(served, "two") | {"content": "", "draft_n": 0} == {
            "prompt_n": 1,
            "cache_n": n - 1,
            "draft_n": 0,
            "content": "",
        }
        headers = {"Authorization": "Bearer two"}
        assert "params" in served.get("/slots", headers=headers).json()[0]
    finally:
        served.close()
