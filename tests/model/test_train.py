"""Parts of drafter training: delta rule, blocks, prompts, order and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conversions import edit_tensors
from train.corpus import functions, prompts, standard_library
from train.delta_rule import chunked_delta_rule, shifted_conv
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflash_gguf.train.answers import Answer, load_answers, save_answers, without_loops
from dflash_gguf.train.ask import prompt_ids, spread
from dflash_gguf.train.blocks import draw_anchors, make_blocks, place_weights
from dflash_gguf.train.checkpoint import pick
from dflash_gguf.train.drafter import BlockModel, even_start, new_drafter, take_weights
from dflash_gguf.train.memory import piece_size
from dflash_gguf.train.parallel import Workers
from dflash_gguf.train.prompts import from_file, user_turn
from dflash_gguf.train.schedule import Optimizers
from dflash_gguf.train.target import Sizes
from dflash_gguf.train.words import Words

MASK = 30
SIZES = Sizes(
    n_layer=8,
    n_embd=32,
    n_vocab=31,
    n_ff=48,
    n_head=2,
    n_head_kv=1,
    head_dim=16,
    n_ctx_train=512,
    norm_eps=1e-6,
    rope_base=1e4,
)


@pytest.fixture
def inputs() -> dict[str, Any]:
    """Arguments of a delta rule longer than a chunk, with some nearly equal keys."""
    torch.manual_seed(0)
    batch, n, heads, d = 2, 77, 3, 16
    key = torch.randn(1, 1, 1, d) + 0.05 * torch.randn(batch, n, heads, d)
    key[0] = torch.randn(n, heads, d)
    return {
        "query": torch.randn(batch, n, heads, d).requires_grad_(),
        "key": key.requires_grad_(),
        "value": torch.randn(batch, n, heads, d).requires_grad_(),
        "g": -0.1 * torch.rand(batch, n, heads),
        "beta": torch.rand(batch, n, heads).sqrt(),
        "initial_state": torch.randn(batch, heads, d, d),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


def test_the_delta_rule_is_transformers_own(inputs: dict[str, Any]) -> None:
    """Observed error of the delta rule: 1e-6 to 1e-5; a missing decay or beta gives 0.1."""
    results = []
    for rule in (modeling_qwen3_5.torch_recurrent_gated_delta_rule, chunked_delta_rule):
        out, state = rule(**inputs)
        total = out.square().sum() + state.square().sum()
        results.append((out, state, *torch.autograd.grad(total, [inputs["query"], inputs["key"]])))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_the_convolution_is_transformers_own() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 6, 19), torch.randn(6, 4)
    expected = modeling_qwen3_5.causal_conv1d_fn(x, weight, None, activation="silu")
    torch.testing.assert_close(shifted_conv(x, weight, None, activation="silu"), expected)


def block_model() -> BlockModel:
    drafter = new_drafter(SIZES, n_layers=2, n_taps=2, block_size=5, mask_token=MASK, seed=3)
    torch.manual_seed(4)
    return BlockModel(drafter, torch.randn(31, 32), torch.randn(31, 32))


def test_blocks_in_one_pass_are_the_references_one_by_one() -> None:
    """Each block alone sees only features before its anchor, as in decoding."""
    model, size = block_model(), 5
    tokens, features = torch.randint(0, 30, (2, 23)), torch.randn(2, 23, 64)
    anchors = torch.tensor([[4, 18, 9], [0, 7, 18]])
    blocks = make_blocks(tokens, anchors, size, MASK)
    with torch.no_grad():
        logits = model(blocks, features)
    for row, places in enumerate(anchors.tolist()):
        for n, place in enumerate(places):
            block = torch.tensor([[int(tokens[row, place]), *[MASK] * (size - 1)]])
            with torch.no_grad():
                hidden = model.drafter(
                    target_hidden=features[row : row + 1, :place],
                    noise_embedding=model.embeddings[block],
                    position_ids=torch.arange(place + size)[None],
                )
            alone = hidden[0, 1:] @ model.head.T
            torch.testing.assert_close(logits[row, n], alone, rtol=1e-4, atol=1e-4)
            assert blocks.wanted[row, n].tolist() == tokens[row, place + 1 : place + size].tolist()


def test_a_new_drafter_starts_near_even_chances() -> None:
    """Head rows have norms in the hundreds, which would give an initial loss in the hundreds."""
    model = block_model()
    model.head *= 100
    even_start(model.drafter, model.head)
    blocks = make_blocks(torch.randint(0, 30, (2, 23)), torch.tensor([[4], [9]]), 5, MASK)
    with torch.no_grad():
        logits = model(blocks, torch.randn(2, 23, 64))
    assert 0.3 < float(logits.std()) < 3


def test_a_steps_words_stand_for_the_whole_vocabulary() -> None:
    """The sampled softmax denominator equals the full one on average."""
    torch.manual_seed(0)
    head, hidden = torch.randn(300, 8), torch.randn(8)
    words = Words([[5, 5, 5, 7, 7, 9], [5, 200]], 300, 40)
    wanted = torch.tensor([[250, 5], [7, 299]])
    sums, generator = [], torch.Generator().manual_seed(1)
    for _ in range(400):
        softmax = words.draw(wanted, generator).to(torch.device("cpu"), head)
        assert softmax.head is not None
        assert torch.equal(softmax.ids[softmax.places(wanted)[0]], wanted)
        assert torch.equal(softmax.head, head[softmax.ids])
        assert {5, 7, 9, 200} <= set(softmax.ids.tolist())
        sums.append((softmax.head @ hidden + softmax.shift).exp().sum())
    assert len(softmax.ids) == len(set(softmax.ids.tolist())) == 4 + 36 + 2
    expected = (head @ hidden).exp().sum()
    assert float(torch.stack(sums).mean() / expected) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("n_words", [0, 31, 40])
def test_all_words_are_the_whole_vocabulary(n_words: int) -> None:
    head = torch.randn(31, 4)
    softmax = Words([[1, 2]], 31, n_words).draw(torch.tensor([30]), torch.Generator())
    assert softmax.ids.tolist() == list(range(31))
    assert softmax.to(torch.device("cpu"), head).head is head
    assert not softmax.shift.any()


def test_anchors_leave_their_blocks_inside_the_answer() -> None:
    first, last = torch.tensor([3, 10]), torch.tensor([10, 13])
    drawn = draw_anchors(first, last, 400, 4, torch.Generator().manual_seed(1))
    assert sorted(set(drawn[0].tolist())) == [3, 4, 5, 6, 7]
    assert sorted(set(drawn[1].tolist())) == [10]


def test_places_lose_weight() -> None:
    weights = place_weights(8, 4.0)
    assert weights[0] == 1
    torch.testing.assert_close(weights[4], torch.tensor(1.0).div(torch.e))


def test_a_loop_ends_an_answer() -> None:
    loop = Answer((9, 9, *[1, 2, 3] * 30), 2)
    assert without_loops(loop, size=6) == Answer((9, 9, *[1, 2, 3] * 4), 2)
    straight = Answer(tuple(range(50)), 2)
    assert without_loops(straight) == straight


def test_answers_survive_the_disk(tmp_path: Path) -> None:
    answers = [Answer((1, 2, 3), 2), Answer((4,), 0)]
    save_answers(tmp_path / "a.json", answers)
    assert load_answers(tmp_path / "a.json") == answers


def test_the_order_is_a_function_of_the_place() -> None:
    whole = pick(7, 1, 0, 21)
    assert [sorted(whole[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert whole[:7] != whole[7:14]
    assert pick(7, 1, 5, 9) == whole[5:14]
    assert pick(7, 2, 0, 21) != whole


def test_gradients_do_not_depend_on_the_threads() -> None:
    layer = torch.nn.Linear(3, 1)
    pieces = [torch.randn(2, 3) for _ in range(5)]

    def loss(piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        value = layer(piece).square().sum()
        return value, value.detach()

    found = []
    for n_threads in (1, 2):
        total = Workers(layer, n_threads).gradients(pieces, loss, 0.5)
        found.append((total, layer.weight.grad))
    (one, gradient), (two, other) = found
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(gradient, other)
    value = sum(layer(piece).square().sum() for piece in pieces) * 0.5
    (expected,) = torch.autograd.grad(value, [layer.weight])
    torch.testing.assert_close(gradient, expected)


def test_the_rate_rises_stays_and_falls() -> None:
    module = torch.nn.Linear(2, 2)
    optimizers = Optimizers(module, n_steps=20, warmup=4, decay=4, muon_rate=1e-2, adam_rate=1e-3)
    factors = [optimizers.factor(step) for step in range(20)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[15:] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    longer = Optimizers(module, n_steps=40, warmup=4, decay=4, muon_rate=1e-2, adam_rate=1e-3)
    assert factors[:16] == [longer.factor(step) for step in range(16)]


@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 32), (1 << 27, 2), (1, 1)])
def test_a_batch_is_cut_to_the_memory(free: int, expected: int) -> None:
    assert piece_size(256, 4096, 32, free) == expected
    assert piece_size(256, 4096, 32, free, n_threads=2) == max(1, expected // 2) or expected == 32


def test_the_corpus_is_split_by_module() -> None:
    modules = standard_library()
    held_out = [module for module in modules if module.held_out]
    assert 0.02 < len(held_out) / len(modules) < 0.1
    assert all("test" not in module.name.split("/")[:-1] for module in modules)
    for text in functions(held_out[0]):
        assert text.startswith(("def ", "async def "))
    heads = prompts(held_out)
    assert len(heads) > 100
    assert all(head.endswith("\n") for head in heads)


def test_prompt_files(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\n\ntwo\n")
    lines.write_text('"one\\nline"\n{"prompt": "two", "id": 3}\n')
    assert from_file(plain) == ["one", "two"]
    assert from_file(lines) == ["one\nline", "two"]
    lines.write_text('\ufeff"a\u2028b"\n\n"c"', encoding="utf-8")
    assert from_file(lines) == ["a\u2028b", "c"]
    for bad in ('{"text": "bad"}', "[" * 100_000):
        lines.write_text(f'"good"\n\n{bad}\n')
        with pytest.raises(ValueError, match=r"a\.jsonl: line 3 is neither a JSON string nor"):
            from_file(lines)


class ChatDecoder:
    """Stands for a decoder whose tokens are characters, with a template or none."""

    def __init__(self, template: Callable[[str], str] | None) -> None:
        self.tokenizer = SimpleNamespace(templates={"": "x"} if template else {})
        self.template = template

    def chat_prompt(self, text: str) -> list[int]:
        assert self.template is not None
        return self.tokenize(self.template(text))

    def tokenize(self, text: str, **_: Any) -> list[int]:
        return list(map(ord, text))

    def detokenize(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


def turn(text: str) -> str:
    return f"<user>{text}</user><bot>"


def test_chat_templates_are_cut_before_the_message() -> None:
    assert user_turn(ChatDecoder(turn)) == list(map(ord, "<user>"))
    with pytest.raises(ValueError, match="does not show the user's message"):
        user_turn(ChatDecoder(lambda text: text.upper()))
    with pytest.raises(ValueError, match="has no chat template"):
        user_turn(ChatDecoder(None))


def test_taps_must_fit_the_target() -> None:
    config = replace(SIZES, n_layer=4)
    with pytest.raises(ValueError, match="5 taps do not fit into a target of 4 layers"):
        new_drafter(config, n_layers=1, n_taps=5, block_size=4, mask_token=1, seed=1)


@pytest.mark.parametrize(
    ("n_layers", "n_taps", "expected"),
    [(8, 3, [1, 3, 5]), (30, 5, [1, 8, 14, 20, 27]), (4, 3, [0, 1, 2]), (4, 2, [0, 2])],
)
def test_taps_are_the_references_where_it_has_any(
    n_layers: int, n_taps: int, expected: list[int]
) -> None:
    config = replace(SIZES, n_layer=n_layers)
    drafter = new_drafter(
        config, n_layers=1, n_taps=n_taps, block_size=4, mask_token=1, seed=1, n_ff=24
    )
    assert drafter.target_layer_ids == expected
    assert drafter.layers[0].mlp.up_proj.weight.shape == (24, 32)


def test_a_training_goes_on_from_another(tmp_path: Path) -> None:
    first = block_model().drafter
    first.save_pretrained(tmp_path)
    same = {"n_layers": 2, "n_taps": 2, "block_size": 5, "mask_token": MASK, "seed": 9}
    second = new_drafter(SIZES, **same)
    take_weights(second, tmp_path)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    with pytest.raises(ValueError, match=r"mlp.* is not \[24, 32\]"):
        take_weights(new_drafter(SIZES, **same, n_ff=24), tmp_path)
    with pytest.raises(ValueError, match="has other layers"):
        take_weights(new_drafter(SIZES, **{**same, "n_layers": 1}), tmp_path)
    for offsets in (torch.tensor(5), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([10**9])):
        edit_tensors(tmp_path, d2t=offsets)
        with pytest.raises(ValueError, match="its d2t is not a list of tokens of this target"):
            take_weights(new_drafter(SIZES, **same), tmp_path)


def test_prompts_become_user_turns() -> None:
    def texts(template: Callable[[str], str] | None, **values: Any) -> list[str]:
        settings = {"plain": False, "instruction": None, "prompt_tokens": 40, **values}
        decoder = ChatDecoder(template)
        rows = prompt_ids(SimpleNamespace(**settings), decoder, ["one", "x" * 30])
        return [decoder.detokenize(row) for row in rows]

    assert texts(turn) == [turn("one")]
    assert texts(turn, prompt_tokens=60) == [turn("one"), turn("x" * 30)]
    assert texts(turn, instruction="Say:") == [turn("Say:\n\none")]
    assert texts(turn, plain=True, prompt_tokens=9) == texts(None, prompt_tokens=9)
    assert texts(None, prompt_tokens=9) == ["one", "x" * 9]


def test_a_share_is_spread_evenly() -> None:
    assert spread(8, 0.25) == [3, 7]
    assert spread(3, 1.0) == [0, 1, 2]
    assert spread(100, 0.0) == []
    assert len(spread(2000, 0.3)) == 600


def test_each_wanted_token_follows_the_place_before_it() -> None:
    tokens = torch.randint(0, 30, (3, 40))
    blocks = make_blocks(tokens, torch.tensor([[0, 7, 34], [3, 3, 20], [30, 1, 2]]), 6, MASK)
    places = blocks.places_before()
    assert places[0, 1].tolist() == [7, 8, 9, 10, 11]
    found = tokens.gather(1, places.flatten(1) + 1).view_as(blocks.wanted)
    assert torch.equal(found, blocks.wanted)
