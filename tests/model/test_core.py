"""The compiled core from Python: bad input gives one sentence and leaves sequences usable."""

from __future__ import annotations

import gc
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import VOCAB_SIZE
from gguf_files import Parts, edited, make_gguf

from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Engine, Error, Model, Sequence, _ffi

Tiny = Callable[[str], Path]
PROMPT = np.random.default_rng(5).integers(0, VOCAB_SIZE, 40).tolist()


def load(path: Path, **settings: Any) -> Model:
    return Model(str(path), LoadConfig(**{"n_ctx": 64, "n_ubatch": 16, "n_threads": 1, **settings}))


def start(path: Path, **settings: Any) -> Sequence:
    return Sequence(Engine(load(path, **settings)))


def last_row(sequence: Sequence) -> np.ndarray:
    return sequence.decode(7).logits()


def assert_one_sentence(message: str) -> None:
    assert "\n" not in message
    assert len(message) < 400
    assert "Traceback" not in message


def refused(path: Path, match: str, **settings: Any) -> None:
    with pytest.raises(Error, match=match) as caught:
        load(path, **settings)
    assert_one_sentence(str(caught.value))
    assert str(path) in str(caught.value)


def test_what_is_no_model_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "No such file")
    refused(tmp_path, "not a file but a folder")
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    refused(path, "the file is empty")
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    refused(path, 'not a GGUF file \\(it does not begin with "GGUF"\\)')
    path.write_bytes(b"GGUF")
    refused(path, "not a GGUF file")


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 0.9, 0.9999])
def test_a_truncated_file_is_named_as_such(tmp_path: Path, tiny_gguf: Tiny, share: float) -> None:
    data = tiny_gguf("llama").read_bytes()
    path = tmp_path / "x.gguf"
    path.write_bytes(data[: max(24, int(len(data) * share))])
    refused(path, "truncated")


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(tmp_path / "x.gguf", '"mamba" cannot be run as a target; supported: llama, qwen2, ')


def test_the_vision_part_of_a_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(tmp_path / "mmproj.gguf", r'the vision part of a model \(architecture "clip"\)')


def test_rows_that_blocks_of_mxfp4_do_not_fill(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "gpt-oss", outtype="auto", packed_experts=True)
    data = path.read_bytes()
    name = b"blk.0.ffn_down_exps.weight"
    at = data.index(name) + len(name) + 4
    (width,) = struct.unpack_from("<Q", data, at)
    assert width == 64
    path.write_bytes(data[:at] + struct.pack("<Q", 48) + data[at + 8 :])
    refused(path, "blk.0.ffn_down_exps.weight")


def drop(name: str) -> Callable[[Parts], object]:
    return lambda parts: parts.tensors.pop(name)


def reshape(name: str, *shape: int) -> Callable[[Parts], object]:
    return lambda parts: parts.f32(name, np.zeros(shape, dtype=np.float32))


def retype(name: str, dtype: Any, kind: str) -> Callable[[Parts], object]:
    def edit(parts: Parts) -> None:
        values, _ = parts.tensors[name]
        parts.tensors[name] = (values.astype(dtype), gguf.GGMLQuantizationType[kind])

    return edit


def put(key: str, value: Any) -> Callable[[Parts], object]:
    return lambda parts: parts.set(key, value)


DAMAGES: dict[str, tuple[str, Callable[[Parts], object], str]] = {
    "missing norm": ("llama", drop("blk.1.attn_norm.weight"), "blk.1.attn_norm.weight is missing"),
    "missing matrix": ("qwen35", drop("blk.0.ssm_out.weight"), "blk.0.ssm_out.weight is missing"),
    "missing embeddings": ("qwen3", drop("token_embd.weight"), "token_embd.weight is missing"),
    "transposed": (
        "llama",
        reshape("blk.0.ffn_up.weight", 96, 160),
        r"blk.0.ffn_up.weight has shape \[160, 96\], expected \[96, 160\]",
    ),
    "one row short": (
        "qwen35",
        reshape("blk.0.ssm_conv1d.weight", 127, 4),
        r"ssm_conv1d.weight has shape \[4, 127\], expected \[4, 128\]",
    ),
    "norm in half precision": (
        "llama",
        retype("output_norm.weight", np.float16, "F16"),
        "output_norm.weight is of type f16, expected f32",
    ),
    "integers as a matrix": (
        "qwen3",
        retype("blk.0.attn_q.weight", np.int32, "I32"),
        "attn_q.weight is of type i32, expected a quantised or float type",
    ),
    "foreign tensor": (
        "llama",
        lambda parts: parts.f32("blk.0.attn_q_norm.weight", np.ones(32, dtype=np.float32)),
        "blk.0.attn_q_norm.weight is not part of architecture llama",
    ),
    "missing key": (
        "llama",
        lambda parts: parts.metadata.pop("llama.block_count"),
        "metadata key llama.block_count is missing",
    ),
    "part of a split file": (
        "llama",
        lambda parts: parts.metadata.update({"split.count": (gguf.GGUFValueType.UINT16, 3, None)}),
        r"the first of 3 files; its name must end in -00001-of-00003\.gguf",
    ),
    "key out of range": (
        "llama",
        put("llama.attention.head_count", 0),
        "llama.attention.head_count is 0, expected 1 to ",
    ),
    "heads that do not divide": (
        "qwen3",
        put("qwen3.attention.head_count_kv", 3),
        "4 heads, not a multiple of its 3 K/V heads",
    ),
    "more experts used than there are": (
        "qwen3moe",
        put("qwen3moe.expert_used_count", 7),
        "expert_used_count is 7, expected 1 to 6",
    ),
    "no sinks": ("gpt-oss", drop("blk.1.attn_sinks.weight"), "blk.1.attn_sinks.weight is missing"),
    "another number of experts": (
        "gpt-oss",
        put("gpt-oss.expert_count", 6),
        r"blk.0.ffn_gate_inp.weight has shape \[96, 8\], expected \[96, 6\]",
    ),
    "dense layers where experts are told of": (
        "gemma4moe",
        drop("blk.2.ffn_gate_up_exps.weight"),
        "blk.2.ffn_gate_exps.weight is missing",
    ),
    "gate without up": (
        "gemma4moe",
        reshape("blk.2.ffn_gate_up_exps.weight", 6, 64, 96),
        r"blk.2.ffn_gate_up_exps.weight has shape \[96, 64, 6\], expected \[96, 128, 6\]",
    ),
    "tokens that do not fit the embeddings": (
        "llama",
        reshape("token_embd.weight", 420, 96),
        "has 420 rows, the tokenizer has 421 tokens",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, tiny_gguf: Tiny, case: str) -> None:
    kind, damage, message = DAMAGES[case]
    refused(edited(tiny_gguf(kind), tmp_path / "x.gguf", damage), message)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "Tofu7"}, "device Tofu7: ggml has no such device, only .*CPU"),
        ({"device": "cpu", "n_gpu_layers": 2}, "n_gpu_layers is 2, but .* is the CPU"),
        ({"backend_module": "/absent.so"}, "backend module /absent.so: no such file"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    tiny_gguf: Tiny, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(Error, match=message):
        Model(str(tiny_gguf("llama")), LoadConfig(**settings))


def test_a_context_larger_than_memory_is_refused(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "llama", num_hidden_layers=64, hidden_size=32, intermediate_size=32)
    model = load(path, n_ctx=1 << 24, cache_type_k="f32", cache_type_v="f32")
    with pytest.raises(Error, match=r"K/V cache of 16777216 cells needs 524288 MiB, .* MiB free"):
        Sequence(Engine(model))
    with pytest.raises(Error, match="n_ctx is 1073741824, expected 1 to 16777216"):
        Sequence(Engine(model, n_ctx=1 << 30))
    assert Sequence(Engine(model, n_ctx=64)).logits(PROMPT).shape == (40, VOCAB_SIZE)


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_cpu_takes_no_masks(tiny_gguf: Tiny, cache_type: str) -> None:
    settings = {"cache_type_k": cache_type, "cache_type_v": cache_type, "n_gpu_layers": 0}
    sequence = start(tiny_gguf("llama"), **settings)
    sequence.prefill(PROMPT)
    engine = sequence.engine
    assert engine.bytes_of("mask") == 0


def test_a_context_of_nothing_is_refused(tiny_gguf: Tiny) -> None:
    with pytest.raises(ValueError, match="n_ctx is 0, must be at least 1"):
        LoadConfig(n_ctx=0)
    with pytest.raises(Error, match="n_ctx is 0, expected 1 to"):
        Sequence(Engine(load(tiny_gguf("llama")), n_ctx=0))


def test_cache_types_that_do_not_work_are_listed_with_those_that_do(tmp_path: Path) -> None:
    path = make_gguf(tmp_path, "llama", num_attention_heads=4, head_dim=24)
    model = load(path, cache_type_k="q8_0")
    message = "cache types q8_0/f16 do not work on CPU with heads of 24 values; valid .*f16/f16"
    with pytest.raises(Error, match=message) as caught:
        Sequence(Engine(model))
    assert "q8_0" not in str(caught.value).partition("valid")[2]


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_bad_tokens_leave_the_sequence_as_it_was(tiny_gguf: Tiny, kind: str) -> None:
    sequence = start(tiny_gguf(kind))
    sequence.prefill(PROMPT[:20])
    with pytest.raises(Error, match="the list of tokens is empty"):
        sequence.prefill([])
    with pytest.raises(Error, match="token id 421 is outside the vocabulary of 421"):
        sequence.prefill([1, VOCAB_SIZE])
    with pytest.raises(Error, match="token id -1 is outside the vocabulary of 421"):
        sequence.decode(-1)
    with pytest.raises(Error, match="token id 9223372036854775807 is outside"):
        sequence.decode((1 << 63) - 1)
    with pytest.raises(Error, match="45 tokens after 20 do not fit into a context of 64"):
        sequence.prefill([1] * 45)
    with pytest.raises(ValueError, match="tokens: need a list of integers, got float64"):
        sequence.prefill([1.5])
    with pytest.raises(ValueError, match="tokens: need a list of integers, got int64"):
        sequence.prefill([[1, 2]])
    assert sequence.position == 20

    fresh = start(tiny_gguf(kind))
    fresh.prefill(PROMPT[:20])
    np.testing.assert_array_equal(last_row(sequence), last_row(fresh))


def test_rows_are_valid_until_the_next_pass(tiny_gguf: Tiny) -> None:
    sequence = start(tiny_gguf("llama"))
    rows = sequence.prefill(PROMPT)
    assert rows.argmax() == rows.logits().argmax()
    kept = sequence.snapshot()
    with pytest.raises(ValueError, match="row 1 is out of range, there are 1 rows"):
        rows.logits(1)
    moves: list[Callable[[], object]] = [
        lambda: sequence.decode(1),
        lambda: sequence.attach(kept, 20),
        sequence.reset,
    ]
    for move in moves:
        sequence.reset()
        rows = sequence.prefill(PROMPT)
        move()
        for read in (rows.argmax, rows.logits):
            with pytest.raises(Error, match="these logits are gone"):
                read()


def test_what_is_closed_says_so(tiny_gguf: Tiny) -> None:
    model = load(tiny_gguf("llama"))
    sequence = Sequence(Engine(model))
    rows = sequence.prefill(PROMPT)
    model.close()
    with pytest.raises(Error, match=r"model\.gguf: the model is closed"):
        Sequence(Engine(model))
    assert np.isfinite(rows.logits()).all()
    rows = sequence.decode(1)
    assert rows.argmax() == rows.logits().argmax()
    sequence.close()
    sequence.close()
    calls: list[Callable[[], object]] = [
        rows.argmax,
        sequence.snapshot,
        sequence.reset,
        lambda: sequence.decode(1),
        lambda: sequence.position,
    ]
    for call in calls:
        with pytest.raises(Error, match="the sequence is closed"):
            call()
    engine = sequence.engine
    engine.close()
    engine.close()
    for call in (engine.info, engine.memory, lambda: engine.set_top_k(1), lambda: Sequence(engine)):
        with pytest.raises(Error, match="the engine is closed"):
            call()


def test_an_engine_has_one_sequence_at_a_time(tiny_gguf: Tiny) -> None:
    engine, fresh = (Engine(load(tiny_gguf("qwen35"))) for _ in range(2))
    engine.reserve_verify(4)
    first = Sequence(engine)
    with pytest.raises(Error, match="the engine has 1 sequence already, and holds 1 at a time"):
        Sequence(engine)
    first.prefill(PROMPT[3:])
    first.verify([1, 2, 3])
    first.close()
    second = Sequence(engine)
    engine.close()
    assert second.position == 0
    np.testing.assert_array_equal(second.logits(PROMPT), Sequence(fresh).logits(PROMPT))


def test_memory_is_told_by_use_and_place(tiny_gguf: Tiny) -> None:
    engine = Engine(load(tiny_gguf("qwen35")))
    assert {use.name for use in engine.memory()} == {"kv", "recurrent", "arena"}
    assert {use.place for use in engine.memory()} == {"CPU"}
    engine.reserve_verify(4)
    assert engine.bytes_of("trace") > 0 == engine.bytes_of("draft")
    with pytest.raises(Error, match="memory record 4 is out of range, the engine has 4 records"):
        _ffi.call("engine_get_memory", engine.handle, 4, _ffi.new("dfl_memory *"))


@pytest.mark.parametrize("kind", ["llama", "qwen35"])
def test_a_prefix_that_does_not_fit_is_refused(tiny_gguf: Tiny, kind: str) -> None:
    sequence, another = start(tiny_gguf(kind)), start(tiny_gguf(kind))
    for each in (sequence, another):
        each.prefill(PROMPT[:20])
    kept = sequence.snapshot()
    for prefix, n, message in (
        (another.snapshot(), 20, "the prefix of 20 tokens belongs to another engine"),
        (kept, 0, "restore from the prefix is 0, expected 1 to 20"),
        (kept, 21, "restore from the prefix is 21, expected 1 to 20"),
    ):
        with pytest.raises(Error, match=message) as caught:
            sequence.attach(prefix, n)
        assert_one_sentence(str(caught.value))
    if kind == "qwen35":
        with pytest.raises(Error, match="restores whole prefixes only, not 19 of 20 tokens"):
            sequence.attach(kept, 19)
    np.testing.assert_array_equal(last_row(sequence), last_row(another))
    sequence.reset()
    sequence.prefill([(PROMPT[0] + 1) % VOCAB_SIZE, *PROMPT[1:20]])
    with pytest.raises(Error, match="it must be empty or begin with those of the prefix"):
        sequence.attach(kept, 20)
    with pytest.raises(Error, match="the sequence holds no tokens for a snapshot"):
        start(tiny_gguf(kind)).snapshot()


@pytest.mark.parametrize("error", [RuntimeError("enough"), KeyboardInterrupt()])
def test_a_load_can_be_cancelled(tiny_gguf: Tiny, error: BaseException) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(type(error)):
        Model(str(tiny_gguf("llama")), LoadConfig(n_ctx=64), progress)


def test_a_load_reports_every_byte(tiny_gguf: Tiny) -> None:
    seen: list[tuple[int, int]] = []
    model = Model(str(tiny_gguf("llama")), None, lambda *x: seen.append(x))
    done, total = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]} == {model.mapped_bytes + model.copied_bytes}


def test_prefill_reports_every_micro_batch(tiny_gguf: Tiny) -> None:
    seen: list[tuple[int, int]] = []
    start(tiny_gguf("llama")).prefill(PROMPT, lambda *x: seen.append(x))
    assert seen == [(16, 40), (32, 40), (40, 40)]


def test_a_callback_cannot_use_its_sequence(tiny_gguf: Tiny) -> None:
    sequence = start(tiny_gguf("qwen35"))
    sequence.prefill(PROMPT)
    kept = sequence.snapshot()
    sequence.reset()
    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: sequence.prefill([1]),
        "decode": lambda: sequence.decode(1),
        "logits": lambda: sequence.logits([1]),
        "verify": lambda: sequence.verify([1]),
        "reserve_verify": lambda: sequence.engine.reserve_verify(4),
        "commit": lambda: sequence.commit(0),
        "set_top_k": lambda: sequence.engine.set_top_k(0),
        "reset": sequence.reset,
        "snapshot": sequence.snapshot,
        "attach": lambda: sequence.attach(kept, 40),
    }
    refused: list[str] = []

    def progress(done: int, _total: int) -> None:
        assert sequence.position == done
        for name, call in calls.items():
            with pytest.raises(Error, match="the engine is busy: an earlier call of it has not"):
                call()
            refused.append(name)

    sequence.prefill(PROMPT, progress)
    assert refused == [*calls] * 3
    fresh = start(tiny_gguf("qwen35"))
    fresh.prefill(PROMPT)
    np.testing.assert_array_equal(last_row(sequence), last_row(fresh))


def test_sequences_in_two_threads_do_not_meet(tiny_gguf: Tiny) -> None:
    model = load(tiny_gguf("qwen35"), n_threads=2)
    alone = Sequence(Engine(model))
    alone.prefill(PROMPT)
    expected = last_row(alone)
    found: list[np.ndarray] = []
    barrier = threading.Barrier(2)

    def run(shared: bool) -> None:
        mine = model if shared else load(tiny_gguf("qwen35"), n_threads=2)
        barrier.wait()
        for _ in range(10):
            sequence = Sequence(Engine(mine))
            sequence.prefill(PROMPT)
            found.append(last_row(sequence))

    threads = [threading.Thread(target=run, args=(shared,)) for shared in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 20
    for row in found:
        np.testing.assert_array_equal(row, expected)


SEQUENCES = """
import sys
from dflash_gguf.config import LoadConfig
from dflash_gguf.native import Model, Engine, Sequence

def resident_mib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

model = Model(sys.argv[1], LoadConfig(n_threads=1, n_gpu_layers=0))
Sequence(Engine(model, 256)).prefill([1, 2, 3])
before = resident_mib()
sequence = Sequence(Engine(model, 1 << 20))
n_bytes = sequence.engine.bytes_of("kv") + sequence.engine.bytes_of("mask")
print(n_bytes >> 20, resident_mib() - before)
sequence.prefill([1, 2, 3])
print(resident_mib() - before)
"""


def test_a_long_context_takes_memory_only_as_it_is_used(tiny_gguf: Tiny) -> None:
    command = [sys.executable, "-c", SEQUENCES, str(tiny_gguf("llama"))]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    caches, created, used = map(float, found)
    assert caches >= 512
    assert created < 32  # the table of 1M cells takes 8 bytes per cell
    assert used < 64


def resident_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise OSError("/proc/self/status has no VmRSS")


@pytest.mark.parametrize("kind", ["llama", "qwen35moe"])
def test_models_and_sequences_leave_no_memory_behind(tiny_gguf: Tiny, kind: str) -> None:
    def cycle() -> None:
        sequence = start(tiny_gguf(kind))
        sequence.prefill(PROMPT[:20])
        kept = sequence.snapshot()
        sequence.decode(1)
        sequence.attach(kept, 20)

    for _ in range(20):
        cycle()
    gc.collect()
    before = resident_kib()
    for _ in range(200):
        cycle()
    gc.collect()
    grown = resident_kib() - before
    print(f"{kind}: {grown} KiB more after 200 cycles")
    # A cycle allocates at least 128 KiB of K and V: a leak would be 25 MiB.
    assert grown < 4096
