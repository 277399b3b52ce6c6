"""Small random pairs of a target and a DFlash drafter, as files and opened."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import PRE_OF_KIND, VOCAB_SIZE, make_drafter, make_target
from device import placement
from dflash_gguf.convert.arch import Options
from dflash_gguf.convert.conversion import prepare
from dflash_gguf.convert.write import write_gguf
from gguf_files import convert
from model_cache import cached
from numpy.typing import NDArray

from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.native import Drafter, Engine, Model, Sequence

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
    plan = prepare(directory, "f32", Options(target_model_dir=target_dir), PRE_OF_KIND[kind])
    write_gguf(path, plan.metadata, plan.plans, plan.types)
    return path


def make_pair(
    folder: Path, kind: str, target: dict[str, Any] | None = None, **drafter: Any
) -> Pair:
    """Makes a random target of `kind` and a random drafter; settings as in checkpoints.py."""
    _make_pair(folder, kind, target or {}, **drafter)
    names = ("target", "drafter", "target.gguf", "drafter.gguf")
    return Pair(*(folder / name for name in names))


@cached
def _make_pair(folder: Path, kind: str, target: dict[str, Any], **drafter: Any) -> None:
    target_dir = make_target(folder / "target", kind, seed=7, **target)
    drafter_dir = make_drafter(folder / "drafter", target_dir, **drafter)
    convert(target_dir, folder / "target.gguf", "f32", PRE_OF_KIND[kind])
    convert_drafter(drafter_dir, target_dir, folder / "drafter.gguf", kind)


def overfit(
    pair: Pair, kind: str, path: Path, prompt: list[int], answer: list[int], share: float = 0.93
) -> Pair:
    """Trains the pair's drafter until it knows `share` of the answer, and returns the new pair.

    Raises RuntimeError if the drafter does not learn.
    """
    folder = path.with_suffix("")
    _overfit(folder, pair.target_dir, pair.drafter_dir, prompt, answer, share)
    trained = convert_drafter(folder, pair.target_dir, path, kind)
    return Pair(pair.target_dir, folder, pair.target, trained)


@cached
def _overfit(folder: Path, *arguments: Any) -> None:
    from overfit import train

    train(folder, *arguments)


def load_target(path: Path, n_ubatch: int = N_UBATCH) -> Model:
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
    """Returns a sequence with a drafter, on one thread."""
    model = load_target(pair.target, n_ubatch)
    return Sequence(Engine(model, n_ctx, Drafter(str(pair.drafter), model), draft_window))


def go_back(sequence: Sequence, tokens: list[int]) -> int:
    """Shortens a sequence to its common prefix with tokens[:-1]; returns the new position.

    The position is 0 if the engine attaches whole prefixes only.
    """
    sequence.commit(0)
    most = min(sequence.position, len(tokens) - 1)
    held = sequence.tokens
    same = next((i for i in range(most) if held[i] != tokens[i]), most)
    if same and same < sequence.position and sequence.engine.partial_prefix_ok:
        sequence.attach(sequence.snapshot(), same)
    elif same < sequence.position:
        sequence.reset()
    return sequence.position


def random_tokens(n: int, seed: int = 11) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, n).tolist()


def draft_logits(sequence: Sequence, last_token: int, n_draft: int) -> NDArray[np.float32]:
    """Returns raw draft logits, float32 [n_draft, n_vocab]; -inf outside of the drafter's head."""
    n_vocab = sequence.engine.model.n_vocab
    tokens, values, log_sum_exp = sequence.draft(last_token, n_draft, n_vocab)
    logits = np.full((n_draft, n_vocab), -np.inf, dtype=np.float32)
    np.put_along_axis(logits, tokens.astype(np.int64), values, axis=1)
    assert (np.diff(values, axis=1) <= 0).all()
    np.testing.assert_allclose(
        log_sum_exp, np.logaddexp.reduce(values, axis=1), rtol=1e-5, atol=1e-5
    )
    return logits


def open_decoder(
    pair: Pair,
    n_parallel: int = 1,
    n_ctx: int = 512,
    *,
    n_bytes: int = 1 << 24,
    n_ubatch: int = N_UBATCH,
    cache_type: str = "f32",
) -> Decoder:
    """Returns a decoder of token ids with a drafter, on one thread.

    n_ctx: cells of all sequences together. n_bytes: limit of prefixes in host memory.
    """
    model = load_target(pair.target)
    config = LoadConfig(
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        n_threads=1,
        cache_type_k=cache_type,
        cache_type_v=cache_type,
        n_parallel=n_parallel,
    )
    # An open scale would change from draft to draft until it is decided.
    drafter = Drafter(str(pair.drafter), model, config=replace(config, draft_embedding_scale="raw"))
    engine = Engine(model, n_ctx, drafter, config=config)
    return Decoder(Sequence(engine), None, prefix_bytes=n_bytes)


def n_left(decoder: Decoder) -> int:
    """Returns the number of tokens that a decoder's last answer left in the prefix cache."""
    return list(decoder._prefix_cache)[-1].n_tokens
