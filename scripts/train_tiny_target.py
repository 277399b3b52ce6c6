"""Trains a small hybrid language model of Python code, from what a Python installation holds.

    python scripts/train_tiny_target.py OUT_DIR

The model has Qwen3.5's architecture (three Gated DeltaNet layers, then one with attention), and a
tokenizer of its own. OUT_DIR becomes a Hugging Face folder for convert-hf-to-gguf; run it again
after an interruption and it continues. Same arguments, same Python, same threads: same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from train.checkpoint import load_state, pick, save_state
from train.corpus import documents, standard_library
from train.delta_rule import fast_delta_rule
from train.parallel import Workers
from train.schedule import Optimizers
from train.vocabulary import END, save_tokenizer, train_tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

N_TOKENS = 512  # of a sequence
N_SEQUENCES = 16  # of a step
PIECE = 2  # sequences a thread handles at a time: what its cache holds
SAVE_SECONDS = 120.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--steps", type=int, default=1200, help="of 8192 tokens each")
    parser.add_argument("--decay", type=int, default=300, help="steps at the end with falling rate")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--muon-rate", type=float, default=5e-3)
    parser.add_argument("--adam-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def new_model(args: argparse.Namespace) -> Qwen3_5ForCausalLM:
    """A random model; decays start long, as the DeltaNet's authors initialise them."""
    config = Qwen3_5TextConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        intermediate_size=args.ffn,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
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
    """Packed sequences [n, N_TOKENS + 1] for training and for evaluation, and bytes per token."""
    modules = standard_library()
    training = documents([module for module in modules if not module.held_out])
    held_out = [module.text for module in modules if module.held_out]
    path = args.out / "tokenizer.json"
    if not path.exists():
        save_tokenizer(train_tokenizer(training, args.vocab), args.out)
    tokenizer = Tokenizer.from_file(str(path))
    end = tokenizer.token_to_id(END)

    def pack(texts: list[str]) -> Tensor:
        """All texts one after the other, END behind each, cut into sequences."""
        order = pick(len(texts), args.seed, 0, len(texts))
        flat: list[int] = []
        for encoding in tokenizer.encode_batch([texts[i] for i in order]):
            flat += [*encoding.ids, end]
        n = len(flat) // (N_TOKENS + 1)
        return torch.tensor(flat[: n * (N_TOKENS + 1)]).view(n, N_TOKENS + 1)

    n_bytes = sum(len(text.encode()) for text in held_out)
    n_tokens = sum(len(e.ids) for e in tokenizer.encode_batch(held_out))
    return pack(training), pack(held_out), n_bytes / n_tokens


def main() -> None:
    """Trains, evaluates, writes."""
    args = parse()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    data, held_out, bytes_per_token = prepare_data(args)
    print(f"{data.numel():,} tokens to train on, {held_out.numel():,} held out", flush=True)
    model = new_model(args)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters:,} parameters", flush=True)
    optimizers = Optimizers(
        model,
        n_steps=args.steps,
        warmup=30,
        decay=args.decay,
        muon_rate=args.muon_rate,
        adam_rate=args.adam_rate,
    )
    workers = Workers(model, args.threads)
    state_path = args.out / "state.pt"
    state = load_state(state_path)
    first, log = 0, []
    if state is not None:
        model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        first, log = state["step"], state["log"]

    def loss(sequences: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, and itself for the log."""
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            logits = model(sequences[:, :-1], use_cache=False).logits
        value = F.cross_entropy(
            logits.float().flatten(0, 1), sequences[:, 1:].flatten(), reduction="sum"
        )
        return value, value.detach()

    def save(step: int) -> None:
        state = {"step": step, "log": log, "model": model.state_dict()}
        save_state(state_path, {**state, "optimizers": optimizers.state_dict()})

    saved = time.monotonic()
    with fast_delta_rule():
        for step in range(first, args.steps):
            rows = data[pick(len(data), args.seed, step * N_SEQUENCES, N_SEQUENCES)]
            total = workers.gradients(rows.split(PIECE), loss, 1 / (N_SEQUENCES * N_TOKENS))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizers.step(step)
            log.append(float(total) / (N_SEQUENCES * N_TOKENS))
            if not math.isfinite(log[-1]):
                raise SystemExit(f"error: the loss is {log[-1]} at step {step + 1}")
            if step % 10 == 9:
                recent = sum(log[-10:]) / 10
                print(f"{time.strftime('%H:%M:%S')} step {step + 1} loss {recent:.3f}", flush=True)
            if time.monotonic() - saved > SAVE_SECONDS:
                save(step + 1)
                saved = time.monotonic()
        save(args.steps)
        with torch.no_grad():
            nats = sum(float(loss(rows)[0]) for rows in held_out.split(PIECE)) / (
                len(held_out) * N_TOKENS
            )
    bits = nats / math.log(2) / bytes_per_token
    print(f"held out: {nats:.3f} nats per token, {bits:.3f} bits per byte")
    model.save_pretrained(args.out)
    figures = {
        "parameters": n_parameters,
        "tokens_seen": args.steps * N_SEQUENCES * N_TOKENS,
        "held_out_bits_per_byte": round(bits, 4),
        "loss": [round(value, 4) for value in log],
    }
    (args.out / "training.json").write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
