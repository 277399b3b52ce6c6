"""Small random pairs of a target and its DFlash drafter, and what the reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import PRE_OF_KIND, VOCAB_SIZE, make_drafter, make_target
from device import placement
from dflash.model import DFlashDraftModel, extract_context_feature
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from gguf_files import convert
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Drafter, Engine, Error, Model, Sequence

torch.set_num_threads(1)  # on models this small a second thread only waits

N_UBATCH = 16
N_CTX = 512


@dataclass(frozen=True)
class Pair:
    """A target and its drafter, each as a checkpoint folder and as a float32 GGUF file."""

    target_dir: Path
    drafter_dir: Path
    target: Path
    drafter: Path


def convert_drafter(directory: Path, target_dir: Path, path: Path, kind: str) -> Path:
    """Converts a drafter's folder for a target of `kind`; returns `path`."""
    plan = prepare(directory, "f32", Options(target_model_dir=target_dir), PRE_OF_KIND[kind])
    write_gguf(path, plan.metadata, plan.plans, plan.types)
    return path


def make_pair(
    folder: Path, kind: str, target: dict[str, Any] | None = None, **drafter: Any
) -> Pair:
    """A random target of `kind` with a random drafter; both settings as checkpoints.py has them."""
    target_dir = make_target(folder / "target", kind, seed=7, **(target or {}))
    drafter_dir = make_drafter(folder / "drafter", target_dir, **drafter)
    return Pair(
        target_dir,
        drafter_dir,
        convert(target_dir, folder / "target.gguf", "f32", PRE_OF_KIND[kind]),
        convert_drafter(drafter_dir, target_dir, folder / "drafter.gguf", kind),
    )


def load_target(path: Path, n_ubatch: int = N_UBATCH) -> Model:
    """A target with float32 K/V, on one thread."""
    config = LoadConfig(
        n_ctx=N_CTX,
        n_ubatch=n_ubatch,
        n_threads=1,
        **placement(),
        cache_type_k="f32",
        cache_type_v="f32",
    )
    return Model(str(path), config)


def open_pair(
    pair: Pair, *, n_ctx: int | None = None, n_ubatch: int = N_UBATCH, draft_window: int = 4096
) -> Sequence:
    """A sequence that drafts."""
    model = load_target(pair.target, n_ubatch)
    return Sequence(Engine(model, n_ctx, Drafter(str(pair.drafter), model), draft_window))


def go_back(sequence: Sequence, tokens: list[int]) -> int:
    """Takes a timeline to where it agrees with tokens, less the last: how many of them are there.

    Where layers have forgotten what they knew there, to the start.
    """
    most = min(sequence.position, len(tokens) - 1)
    held = sequence.tokens
    same = next((i for i in range(most) if held[i] != tokens[i]), most)
    try:
        sequence.truncate(same)
    except Error as error:
        assert "goes back" in str(error)
        sequence.reset()
    return sequence.position


def random_tokens(n: int, seed: int = 11) -> list[int]:
    """A prompt nobody would write."""
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, n).tolist()


def draft_logits(sequence: Sequence, last_token: int, n_draft: int) -> NDArray[np.float32]:
    """All raw logits of a draft, float32 [n_draft, n_vocab] (-inf: not in the drafter's head)."""
    n_vocab = sequence.engine.model.n_vocab
    tokens, values, log_sum_exp = sequence.draft(last_token, n_draft, n_vocab)
    logits = np.full((n_draft, n_vocab), -np.inf, dtype=np.float32)
    np.put_along_axis(logits, tokens.astype(np.int64), values, axis=1)
    assert (np.diff(values, axis=1) <= 0).all()
    np.testing.assert_allclose(
        log_sum_exp, np.logaddexp.reduce(values, axis=1), rtol=1e-5, atol=1e-5
    )
    return logits


class Reference:
    """The reference package over the features transformers gives for one list of tokens."""

    def __init__(self, pair: Pair, tokens: list[int]) -> None:
        """tokens: every token whose features a draft may see."""
        self.tokens = tokens
        self.target = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=torch.float32)
        self.target.eval()
        self.drafter = DFlashDraftModel.from_pretrained(pair.drafter_dir, dtype=torch.float32)
        self.drafter.eval()
        settings = self.drafter.config.dflash_config
        self.embedding_scale = settings.get("input_embedding_scale", 1.0)
        self.embeddings: torch.Tensor = self.target.get_input_embeddings().weight
        self.head: torch.Tensor = self.target.get_output_embeddings().weight
        with torch.no_grad():
            states = self.target(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        self.features = extract_context_feature(states, self.drafter.target_layer_ids)

    def draft_logits(
        self, position: int, n_draft: int, window: int | None = None
    ) -> NDArray[np.float32]:
        """Logits after `tokens[position]`, of which the first `position` tokens are context.

        window: only so many of the last features are given.
        """
        first = max(0, position - window) if window else 0
        block = [self.tokens[position], *[self.drafter.mask_token_id] * n_draft]
        with torch.no_grad():
            hidden = self.drafter(
                target_hidden=self.features[:, first:position],
                noise_embedding=self.embeddings[torch.tensor([block])] * self.embedding_scale,
                position_ids=torch.arange(first, position + len(block))[None],
            )
            logits = self.drafter.compute_logits(hidden[0, 1:], lambda x: x @ self.head.T)
        found: NDArray[np.float32] = logits.numpy()
        return found


def open_decoder(
    pair: Pair,
    n_parallel: int = 1,
    n_ctx: int = 512,
    *,
    n_bytes: int = 1 << 24,
    n_ubatch: int = N_UBATCH,
    cache_type: str = "f32",
) -> Decoder:
    """A decoder of token ids, with a drafter, on two threads.

    n_ctx: of all answers together. n_bytes: what may be kept of them on the host.
    """
    model = load_target(pair.target)
    config = LoadConfig(
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        n_threads=2,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        n_parallel=n_parallel,
    )
    engine = Engine(model, n_ctx, Drafter(str(pair.drafter), model), config=config)
    return Decoder(Sequence(engine), None, prefix_bytes=n_bytes)


def n_left(decoder: Decoder) -> int:
    """Tokens that the last answer of a decoder left behind."""
    return list(decoder._prefixes)[-1].n_tokens
