"""dflash-bench: prompt files, settings and the replay of recorded drafts."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dflash_gguf.bench import replay
from dflash_gguf.bench.measure import branched
from dflash_gguf.bench.prompts import Prompt, read_prompts
from dflash_gguf.bench.settings import DEFAULT, Setting, parse_settings
from dflash_gguf.bench.summary import ratio_interval
from dflash_gguf.native import Draft
from dflash_gguf.speculative.controller import ControllerState
from dflash_gguf.speculative.cost_model import CostModel, Round
from dflash_gguf.speculative.proposers.dflash import DFlash


def test_prompt_files_hold_texts_or_tokens(tmp_path: Path) -> None:
    lines = '{"prompt": "ä b", "task": 3}\n\n{"tokens": [1, 2]}\n'
    plain, packed = tmp_path / "some.jsonl", tmp_path / "more.jsonl.gz"
    plain.write_text(lines, encoding="utf-8")
    packed.write_bytes(gzip.compress(lines.encode()))
    expected = [Prompt("some 1", "ä b"), Prompt("some 2", None, (1, 2)), Prompt("more 1", "ä b")]
    assert read_prompts([str(plain), str(packed)])[:3] == expected
    assert len(read_prompts([str(plain), str(packed)], 1)) == 2


def test_prompt_sets_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(read_prompts([name])) for name in ("seeds", "humaneval")] == [3, 10]
    assert read_prompts(["seeds"], 1)[0].name == "seeds 1"
    monkeypatch.chdir(tmp_path)
    Path("seeds").write_text('{"prompt": "mine"}')  # a file goes before a set of its name
    assert [prompt.text for prompt in read_prompts(["seeds"])] == ["mine"]


BAD = {
    "": "holds no prompt",
    "\n \n": "holds no prompt",
    "hello": "line 1 is not JSON",
    "[1]": "line 1 needs a",
    '{"prompt": 3}': "line 1 needs a",
    '{"prompt": ""}': "line 1 needs a",
    '{"tokens": []}': "line 1 needs a",
    '{"tokens": [1, true]}': "line 1 needs a",
    '{"tokens": [1], "prompt": "x"}': "line 1 needs a",
    '{"prompt": "x"}\n{': "line 2 is not JSON",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_prompt_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=BAD[text]) as caught:
        read_prompts([str(path)])
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(ValueError, match="is not a prompt file"):
        read_prompts([str(path)])


def test_settings_have_names() -> None:
    found = parse_settings(DEFAULT, 15)
    assert ",".join(map(str, found)) == DEFAULT
    assert parse_settings("chain 8,chain 20, chain 15", 9) == [
        Setting("chain", 8),
        Setting("chain", 9),
    ]
    assert Setting("chain", 4).fields == {"draft": "chain", "draft_max": 4}
    assert Setting("tree", 9).fields == {"draft": "tree", "tree_budget": 9}
    assert Setting("auto").fields == {"draft": "auto"}
    for text in ("", "chain", "chain x", "tree 0", "tree 256", "none 3", "bush 4", "tree -1"):
        with pytest.raises(ValueError, match=r"is no setting|must have 1 to"):
            parse_settings(text, 15)


def test_ratios_and_their_interval() -> None:
    mean, low, high = ratio_interval([1.0, 2.0, 4.0])
    assert mean == pytest.approx(2.0)
    assert 1.0 <= low < mean < high <= 4.0


@pytest.mark.parametrize("n", [1, 2, 3, 8, 24, 64, 256])
def test_measured_trees_are_trees(n: int) -> None:
    parents = branched(n)
    assert len(parents) == n
    assert parents[0] == -1
    assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
    assert n < 4 or len(set(parents)) < n


def known_costs(rows: Callable[[int], float], draft: Callable[[int], float]) -> CostModel:
    costs = CostModel()
    for _ in range(3):
        costs.observe(Round(0, n_tokens=1, pass_s=rows(1)))
        for n in (1, 2, 3, 5, 7, 11, 15):
            for is_tree in (False, True):
                done = Round(0, n_positions=n, n_draft_rows=n + 1, n_drafted=n, is_tree=is_tree)
                done.proposer, done.is_top1 = DFlash.name, not is_tree
                done.n_tokens, done.draft_s, done.pass_s = 1, draft(n), rows(n + 1)
                costs.observe(done)
    return costs


def recorded(hits: float, seed: int = 0) -> replay.Record:
    """Records a random answer; drafts rank the right token first with probability `hits`."""
    n_tokens, rng = 200, np.random.default_rng(seed)
    tokens = rng.integers(0, 1000, n_tokens + 16).tolist()
    drafts = []
    for at in range(n_tokens - 1):
        right = np.array(tokens[at + 1 : at + 16])[:, None]
        found = np.concatenate([right, 1000 + np.tile(np.arange(31), (15, 1))], axis=1)
        missed = rng.random(15) >= hits
        found[missed, :2] = found[missed, 1::-1]
        logits = np.tile([5.0, *np.linspace(2, -4, 31)], (15, 1)).astype(np.float32)
        drafts.append({15: Draft(found.astype(np.int32), logits, np.logaddexp.reduce(logits, 1))})
    return replay.Record(100, tokens[:n_tokens], drafts)


def new() -> tuple[ControllerState, DFlash, int]:
    return ControllerState(), DFlash(15), 63


def test_a_replay_takes_what_the_record_would_have_accepted() -> None:
    perfect, costs = recorded(1.0), known_costs(lambda rows: 1.0 + rows, lambda n: 0.5 * n)
    seconds, rounds = replay.play(perfect, Setting("chain", 4), costs, *new())
    assert all(done.n_accepted == done.n_drafted for done in rounds)
    assert sum(done.n_tokens for done in rounds) == 199
    assert seconds == pytest.approx(sum(6.0 + 2.0 for _ in rounds[:-1]) + rounds[-1].seconds)
    plain, _ = replay.play(perfect, Setting("none"), costs, *new())
    assert plain == pytest.approx(199 * 2.0)
    second = recorded(0.0)
    _, rounds = replay.play(second, Setting("chain", 4), costs, *new())
    assert {done.n_accepted for done in rounds} == {0}
    _, rounds = replay.play(second, Setting("tree", 40), costs, *new())
    assert np.mean([done.n_accepted for done in rounds]) > 1


@pytest.mark.parametrize("hits", [0.3, 0.9])
@pytest.mark.parametrize("per_row", [0.01, 1.0])
def test_auto_is_held_against_the_best(hits: float, per_row: float) -> None:
    records = [recorded(hits, seed=seed) for seed in range(4)]
    costs = known_costs(lambda rows: 5.0 + per_row * rows, lambda _: 0.5)
    speeds = replay.evaluate(records, parse_settings(DEFAULT, 15), costs, 63)
    ratios = replay.against_best(speeds)
    assert np.mean(ratios[1:]) > 0.9
    assert max(max(rates) for rates in speeds.values()) >= speeds["none"][0]
