"""Trains a small Qwen3.5-like language model on the Python code of a Python installation.

    python scripts/train/train_tiny_target.py OUT_DIR

OUT_DIR becomes a Hugging Face folder for convert-hf-to-gguf. After an interruption the same command
continues. Equal arguments, Python and threads give equal weights.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from dflash_gguf._files import write_text

sys.path.append(str(Path(__file__).resolve().parents[1]))
from dflash_gguf.train.checkpoint import load_state, pick, save_state
from dflash_gguf.train.parallel import Workers, precision
from dflash_gguf.train.schedule import Optimizers
from train.corpus import documents, standard_library
from train.delta_rule import fast_delta_rule
from train.vocabulary import END, save_tokenizer, train_tokenizer

PIECE = 2  # sequences that a thread computes at once, few enough for its cache
SAVE_SECONDS = 120.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--steps", type=int, default=500, help="number of updates")
    parser.add_argument(
        "--decay", type=int, default=140, help="updates at the end with falling learning rate"
    )
    parser.add_argument("--sequences", type=int, default=16, help="sequences per update")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--modules", type=int, help="use only this many modules, for a trial")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=1280)
    parser.add_argument("--heads", type=int, default=8, help="attention heads of width 64")
    parser.add_argument(
        "--value-heads",
        type=int,
        default=8,
        help="value heads of DeltaNet, which has half as many key heads",
    )
    parser.add_argument("--muon-rate", type=float, default=3e-3)
    parser.add_argument("--adam-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def new_model(args: argparse.Namespace) -> Qwen3_5ForCausalLM:
    """Returns a random model, whose DeltaNet decays are initialised as DeltaNet's authors do."""
    config = Qwen3_5TextConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=args.ffn,
        num_attention_heads=args.heads,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=max(1, args.value_heads // 2),
        linear_num_value_heads=args.value_heads,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=args.vocab - 2,
        bos_token_id=None,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
    torch.manual_seed(args.seed)
    model = Qwen3_5ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                wanted = torch.exp(
                    torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(0.1))
                )
                parameter.copy_(torch.log(torch.expm1(wanted)))
    return model


def prepare_data(args: argparse.Namespace) -> tuple[Tensor, Tensor, float]:
    """Returns token ids to train on and held-out ones, [n, --tokens + 1], and bytes per token."""
    modules = standard_library()
    training = documents([module for module in modules if not module.held_out][: args.modules])
    held_out = [module.text for module in modules if module.held_out]
    path = args.out / "tokenizer.json"
    if not path.exists():
        save_tokenizer(train_tokenizer(training, args.vocab), args.out)
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id(END)

    def pack(texts: list[str]) -> Tensor:
        """Joins tokenized texts in random order, END after each; cuts them into sequences."""
        order = pick(len(texts), args.seed, 0, len(texts))
        flat: list[int] = []
        for encoding in tokenizer.encode_batch([texts[i] for i in order]):
            flat += [*encoding.ids, end]
        width = args.tokens + 1
        n = len(flat) // width
        if not n:
            raise ValueError(
                f"{len(flat)} tokens are too few for a sequence of {width}; give more --modules"
            )
        return torch.tensor(flat[: n * width]).view(n, width)

    n_bytes = sum(len(text.encode()) for text in held_out)
    n_tokens = sum(len(e.ids) for e in tokenizer.encode_batch(held_out))
    return pack(training), pack(held_out), n_bytes / n_tokens


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, evaluates and writes the model; ArithmeticError if the loss is not finite."""
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    data, held_out, bytes_per_token = prepare_data(args)
    model = new_model(args)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{n_parameters:,} parameters, {data.numel():,} tokens to train on, "
        f"{held_out.numel():,} held out",
        flush=True,
    )
    log = train(args, model, data)
    with fast_delta_rule(), torch.no_grad():
        total = sum(float(loss_of(model, rows)[0]) for rows in held_out.split(PIECE))
    nats = total / (len(held_out) * args.tokens)
    model.save_pretrained(args.out)
    figures = {
        "parameters": n_parameters,
        "tokens_seen": args.steps * args.sequences * args.tokens,
        "held_out_nats_per_token": round(nats, 4),
        "held_out_bits_per_byte": round(nats / math.log(2) / bytes_per_token, 4),
        "python": platform.python_version(),
    }
    write_text(args.out / "training.json", json.dumps({**figures, "losses": log}))
    return figures


def loss_of(model: Qwen3_5ForCausalLM, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed cross-entropy of sequences in nats, and a copy without gradient."""
    with precision(sequences.device):
        logits = model(sequences[:, :-1], use_cache=False).logits
    wanted = sequences[:, 1:].flatten()
    value = F.cross_entropy(logits.float().flatten(0, 1), wanted, reduction="sum")
    return value, value.detach()


def train(args: argparse.Namespace, model: Qwen3_5ForCausalLM, data: Tensor) -> list[float]:
    """Runs the remaining steps; returns all losses. ArithmeticError if a loss is not finite."""
    optimizers = Optimizers(
        model,
        n_steps=args.steps,
        warmup=30,
        decay=args.decay,
        muon_rate=args.muon_rate,
        adam_rate=args.adam_rate,
    )
    path = args.out / "state.pt"
    state = load_state(path)
    first, log = 0, []
    if state is not None:
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        first, log = state["step"], state["log"]
    workers = Workers(model, args.threads)
    n_tokens = args.sequences * args.tokens
    saved = time.monotonic()
    for step in range(first, args.steps):
        rows = data[pick(len(data), args.seed, step * args.sequences, args.sequences)]
        with fast_delta_rule():
            total = workers.gradients(
                rows.split(PIECE), lambda piece: loss_of(model, piece), 1 / n_tokens
            )
        log.append(float(total) / n_tokens)
        if not math.isfinite(log[-1]):
            raise ArithmeticError(f"the loss is {log[-1]} at step {step + 1}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        workers.alone(functools.partial(optimizers.step, step))
        if step % 10 == 9:
            recent = sum(log[-10:]) / 10
            print(f"{time.strftime('%H:%M:%S')} step {step + 1} loss {recent:.3f}", flush=True)
        if time.monotonic() - saved > SAVE_SECONDS or step + 1 == args.steps:
            state = {"step": step + 1, "log": log, "model": model.state_dict()}
            save_state(path, {**state, "optimizers": optimizers.state_dict()})
            saved = time.monotonic()
    return log


def main(arguments: list[str] | None = None) -> int:
    """Runs one command line; returns the exit code."""
    try:
        print(json.dumps(run(parse(arguments))))
    except (ValueError, OSError, ArithmeticError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
