"""Measures wall time and peak memory of our converter and of llama.cpp's, on one checkpoint.

Each run is a process of its own, and the two converters take turns. The checkpoint is random, of
SmolLM2-135M's shape (269 MB in bfloat16). The last line is one JSON object of medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from turns import facts, in_turns

from dflash_gguf import Error
from dflash_gguf.backend_build.sources import DEFAULT_CACHE, fetch, installed_version

N_VOCAB, N_EMBD, N_FF, N_LAYER, N_HEAD, N_HEAD_KV, HEAD_DIM = 49152, 576, 1536, 30, 9, 3, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": N_VOCAB,
    "hidden_size": N_EMBD,
    "intermediate_size": N_FF,
    "num_hidden_layers": N_LAYER,
    "num_attention_heads": N_HEAD,
    "num_key_value_heads": N_HEAD_KV,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
# Runs llama.cpp's converter with a given pre-tokenizer, as it cannot detect a random tokenizer's.
PEER = """
import sys
sys.path.insert(0, sys.argv[1])
import convert_hf_to_gguf
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "qwen2"
sys.argv = ["convert_hf_to_gguf.py", *sys.argv[2:]]
convert_hf_to_gguf.main()
"""


def make_checkpoint(directory: Path) -> None:
    """Writes a random checkpoint: config.json, model.safetensors and the tokenizer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(0.05).to(torch.bfloat16)

    q, kv = N_HEAD * HEAD_DIM, N_HEAD_KV * HEAD_DIM
    tensors = {"model.embed_tokens.weight": weight(N_VOCAB, N_EMBD)}
    tensors["model.norm.weight"] = weight(N_EMBD)
    for layer in range(N_LAYER):
        sizes = {
            "self_attn.q_proj": (q, N_EMBD),
            "self_attn.k_proj": (kv, N_EMBD),
            "self_attn.v_proj": (kv, N_EMBD),
            "self_attn.o_proj": (N_EMBD, q),
            "mlp.gate_proj": (N_FF, N_EMBD),
            "mlp.up_proj": (N_FF, N_EMBD),
            "mlp.down_proj": (N_EMBD, N_FF),
            "input_layernorm": (N_EMBD,),
            "post_attention_layernorm": (N_EMBD,),
        }
        tensors |= {f"model.layers.{layer}.{k}.weight": weight(*v) for k, v in sizes.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer with N_VOCAB tokens: bytes, merged pairs, and two special tokens."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters][: N_VOCAB - len(letters) - 2]
    vocabulary = {text: i for i, text in enumerate([*letters, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": special[1], "bos_token": special[0]}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def run(command: list[str]) -> tuple[float, float]:
    """Runs a process; returns its wall seconds and its peak resident MB."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()}")
    return seconds, usage.ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", type=int, default=5, help="runs of each converter; default: %(default)s"
    )
    parser.add_argument("--outtype", default="q8_0", choices=("f32", "f16", "bf16", "q8_0"))
    parser.add_argument(
        "--cache",
        type=Path,
        default=DEFAULT_CACHE,
        help="folder of llama.cpp's sources; default: %(default)s",
    )
    arguments = parser.parse_args()
    try:
        sources = fetch(arguments.cache)
    except Error as error:
        raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        folder.mkdir()
        # Makes the checkpoint in a child: a converter's peak counts this process's memory at fork.
        maker = multiprocessing.get_context("spawn").Process(target=make_checkpoint, args=(folder,))
        maker.start()
        maker.join()
        if maker.exitcode:
            raise SystemExit("the checkpoint could not be written")
        shared = [str(folder), "--outtype", arguments.outtype, "--outfile"]
        commands = {
            "ours": [sys.executable, "-m", "dflash_gguf.convert", "--pre", "qwen2", *shared],
            "llama.cpp": [sys.executable, "-c", PEER, str(sources), *shared],
        }
        sides = {
            name: partial(run, [*command, str(Path(temporary) / f"{name}.gguf")])
            for name, command in commands.items()
        }
        in_turns(sides, 1)  # warm-up, which fills the page cache
        runs = in_turns(sides, arguments.runs)
    for name, values in runs.items():
        for wall, peak in values:
            print(f"{name:>10}: {wall:6.2f} s  {peak:6.0f} MB")
    print(json.dumps(summary(arguments, runs)))
    return 0


def summary(
    arguments: argparse.Namespace, runs: dict[str, list[tuple[float, float]]]
) -> dict[str, object]:
    """Returns median seconds and peak memory in MB of both converters, and the ratios."""
    wall, peak = (
        {name: statistics.median(value[i] for value in values) for name, values in runs.items()}
        for i in range(2)
    )
    return {
        **facts(),
        "outtype": arguments.outtype,
        "runs": arguments.runs,
        "seconds": {name: round(value, 3) for name, value in wall.items()},
        "peak_mb": {name: round(value) for name, value in peak.items()},
        "speedup": round(wall["llama.cpp"] / wall["ours"], 2),
        "memory_ratio": round(peak["ours"] / peak["llama.cpp"], 2),
        "llama_cpp_python": installed_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
