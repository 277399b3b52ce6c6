"""The memory plan before loading equals the allocations of a real load."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import CLASSES
from dflash_gguf.convert.schema import Tensor
from gguf import GGUFReader
from gguf_files import edited, make_gguf
from pairs import Pair, make_pair
from synthetic_gguf import write_model
from synthetic_shapes import PRESETS

from dflash_gguf.cli import main
from dflash_gguf.config import LoadConfig
from dflash_gguf.decoder import Decoder
from dflash_gguf.loading import load
from dflash_gguf.memory.fit import (
    USABLE,
)
from dflash_gguf.memory.plan import Plan, Planner, check_fits, plan_of
from dflash_gguf.native import Drafter, Engine, Error, Model, Sequence

CONFIG = LoadConfig(n_ctx=512, n_ubatch=64, n_threads=1, n_gpu_layers=0, draft_window=128)
GPU = 24 << 30


@pytest.fixture(scope="module", params=CLASSES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("plan"), request.param)


def real_plan(pair: Pair, config: LoadConfig, drafts: bool, verify_rows: int) -> Plan:
    """Returns the plan that follows from the buffers of a loaded engine."""
    model = Model(str(pair.target), config)
    drafter = Drafter(str(pair.drafter), model) if drafts else None
    engine = Engine(model, None, drafter, config.draft_window)
    if verify_rows:
        engine.reserve_verify(verify_rows)
    return plan_of(engine, config, 1 << 40)


@pytest.mark.parametrize("types", [("f16", "f16"), ("f32", "f32"), ("q8_0", "q4_0")])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_plan_counts_what_loading_allocates(
    pair: Pair, drafts: bool, types: tuple[str, str]
) -> None:
    config = replace(CONFIG, cache_type_k=types[0], cache_type_v=types[1])
    rows = 40 if drafts else 0
    planner = Planner(str(pair.target), str(pair.drafter) if drafts else None, config)
    try:
        plan = planner.plan(verify_rows=rows)
    except Error as error:
        assert "cache types" in str(error)
        with pytest.raises(Error, match="cache types"):
            real_plan(pair, config, drafts, rows)
        return
    assert plan.items == real_plan(pair, config, drafts, rows).items


@pytest.mark.parametrize("outtype", ["q8_0", "q4_0"])
@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen35moe"])
def test_a_plan_knows_where_weights_are_copied(
    tmp_path: Path, kind: str, repack: bool, outtype: str
) -> None:
    path = make_gguf(tmp_path, kind, outtype=outtype)
    config = replace(CONFIG, repack=repack)
    model = Model(str(path), config)
    real = plan_of(Engine(model), config, 1 << 40)
    assert Planner(path, None, config).plan().items == real.items
    assert any(x.name == "target weights" and x.where == "file" for x in real.items) or repack


@pytest.mark.parametrize("n_cpu_moe", [0, 1])
def test_a_plan_predicts_the_speed_of_experts_where_they_are(
    tmp_path: Path, n_cpu_moe: int
) -> None:
    path = make_gguf(tmp_path, "qwen35moe")
    config = replace(CONFIG, n_gpu_layers=None, n_cpu_moe=n_cpu_moe, repack=False)
    planner = Planner(path, None, config, vram=GPU)
    sizes = {x.name: int(x.n_bytes) for x in GGUFReader(path).tensors if "_exps." in x.name}
    first = sum(size for name, size in sizes.items() if name.startswith("blk.0."))
    model = planner.model
    assert model.expert_bytes == sum(sizes.values()) > first > 0
    assert model.cpu_expert_bytes == n_cpu_moe * first
    assert 0 < model.n_expert_used < model.n_expert
    assert "tokens/s of one answer" in planner.plan().table()
    real = Model(str(path), replace(config, n_gpu_layers=0))
    assert (real.expert_bytes, real.cpu_expert_bytes) == (model.expert_bytes, 0)


@pytest.mark.parametrize("name", [name for name, shape in PRESETS.items() if not shape.taps])
def test_files_of_true_sizes_are_planned_without_their_tensors(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_model(path, PRESETS[name], name, "q4_k_m", 1, header_only=True)
    assert path.stat().st_blocks * 512 < 32 << 20
    config = LoadConfig(n_ctx=131072, cache_type_k="q4_0", cache_type_v="q4_0")
    plan = Planner(path, None, config, GPU).plan()
    sizes = {x.name: x.bytes for x in plan.items}
    weights = sizes["target weights"] + sizes["token embeddings"]
    if PRESETS[name].tied:  # tied models put the head on the GPU and read embeddings from the file
        weights -= next(x.n_bytes for x in GGUFReader(path).tensors if x.name == Tensor.TOKEN_EMBD)
    assert weights == pytest.approx(path.stat().st_size, rel=0.02)


def test_a_27b_hybrid_with_its_drafter_and_128k_tokens_fits_into_24_gb(tmp_path: Path) -> None:
    files = [tmp_path / "target.gguf", tmp_path / "drafter.gguf"]
    for path, name in zip(files, ("qwen35-27b", "qwen35-27b-dflash"), strict=True):
        write_model(path, PRESETS[name], name, "q4_k_m", 1, header_only=True)
    config = LoadConfig(n_ctx=131072, cache_type_k="q4_0", cache_type_v="q4_0")
    plan = Planner(*files, config, GPU).plan(verify_rows=64)
    assert plan.needed_bytes < 22.5 * (1 << 30)
    copies = 2 * 131072 * 4 * 256 * 2  # F16 copies of one layer's K and V
    assert next(x.bytes for x in plan.items if x.name.startswith("compute")) > copies


def test_a_gpu_that_is_not_there_has_all_but_the_embeddings(pair: Pair) -> None:
    config = replace(CONFIG, n_gpu_layers=None)
    planner = Planner(str(pair.target), str(pair.drafter), config, vram=GPU)
    plan = planner.plan()
    assert (plan.on_gpu, plan.free_bytes, plan.missing_bytes) == (True, GPU, 0)
    assert {item.name for item in plan.items if item.where == "file"} == {"token embeddings"}
    here = {x.name: x.bytes for x in real_plan(pair, CONFIG, True, 0).items}
    there = {x.name: x.bytes for x in plan.items}
    for name in ("K/V cache", "drafter's K/V and features"):
        assert there[name] == here[name] > 0
    assert there["target weights"] > here["target weights"] - here.get("token embeddings", 0)


def test_a_gpu_keeps_float16_copies_of_quantised_keys(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", {"head_dim": 64})
    config = LoadConfig(n_ctx=4096, n_ubatch=2)

    def compute_buffer(type_name: str) -> int:
        both = replace(config, cache_type_k=type_name, cache_type_v=type_name)
        plan = Planner(str(pair.target), None, both, vram=GPU).plan()
        return next(x.bytes for x in plan.items if x.name.startswith("compute buffer"))

    n_values = 4096 * 64 * 2  # values of K or V in one layer: cells, head_dim, heads
    copies = compute_buffer("q8_0") - compute_buffer("f16")
    assert copies == pytest.approx(2 * 2 * n_values, rel=0.03)


def test_iq4_nl_is_refused_on_a_gpu(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, "llama", {"head_dim": 64})
    config = LoadConfig(n_ctx=256, cache_type_k="iq4_nl", cache_type_v="iq4_nl")
    with pytest.raises(Error, match="iq4_nl/iq4_nl do not work on a hypothetical CUDA GPU"):
        Planner(str(pair.target), None, config, vram=GPU).plan()


def test_the_nodes_of_a_pass_follow_from_layers_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    shape = PRESETS["qwen35-27b"]
    write_model(path, shape, "x", "q4_k_m", 1, header_only=True)

    def nodes(**config: int) -> int:
        model = Model(str(path), LoadConfig(**config), dry_run="cuda")
        return int(Engine(model).info().n_graph_nodes)

    n = nodes(n_ctx=8192, n_parallel=16)
    assert nodes(n_ctx=131072, n_parallel=16) == n
    assert nodes(n_ctx=131072, n_parallel=64) == n == nodes(n_ctx=8192, n_parallel=2)
    assert nodes(n_ctx=8192, n_parallel=1) <= n < 80 * 64


def test_a_measured_engine_does_not_run(pair: Pair) -> None:
    engine = Engine(Model(str(pair.target), CONFIG, dry_run="device"))
    with pytest.raises(Error, match="is a dry run"):
        Sequence(engine)


def test_a_load_that_does_not_fit_names_the_missing_bytes(pair: Pair) -> None:
    plan = replace(Planner(str(pair.target), None, CONFIG).plan(), free_bytes=1000)
    with pytest.raises(Error, match=f"{plan.needed_bytes - 1000} bytes short"):
        check_fits(plan)


def room_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, config: LoadConfig, verify_rows: int
) -> int:
    """Sets the free memory to the need of a verify of verify_rows rows; returns its bytes."""
    plan = Planner(pair.target, pair.drafter, config).plan(verify_rows=verify_rows)
    n = int(plan.needed_bytes / USABLE) + 1
    monkeypatch.setattr("dflash_gguf.memory.plan.free_bytes", lambda _: n)
    return n


def open_decoder(pair: Pair, config: LoadConfig) -> Decoder:
    return load(pair.target, drafter=pair.drafter, **asdict(config))


@pytest.mark.parametrize("n_rows", [8, 20, 64])
def test_auto_takes_no_more_than_was_checked_before_loading(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, n_rows: int
) -> None:
    free = room_for(pair, monkeypatch, CONFIG, n_rows)
    with open_decoder(pair, CONFIG) as decoder:
        drafting, engine = decoder._speculative, decoder.engine
        for wanted in (n_rows, 64, 256):
            drafting.make_room(wanted, is_needed=False)
        assert engine.max_verify >= n_rows
        real = plan_of(engine, CONFIG, free)
        assert real.missing_bytes == 0
        assert engine.max_verify < 256
        drafting.make_room(256, is_needed=True)
        assert engine.max_verify == 256


def test_a_growth_that_failed_is_not_tried_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def refuse(_: Engine, n: int) -> None:
        asked.append(n)
        raise Error("no memory")

    with open_decoder(pair, CONFIG) as decoder:
        monkeypatch.setattr(Engine, "reserve_verify", refuse)
        for _ in range(3):
            decoder._speculative.make_room(64, is_needed=False)
        assert asked == [64]
        with pytest.raises(Error, match="no memory"):
            decoder._speculative.make_room(64, is_needed=True)


def test_the_context_nobody_chose_is_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path, "llama", {"max_position_embeddings": 131072})
    config = replace(CONFIG, n_ctx=None)
    with open_decoder(pair, config) as decoder:
        assert decoder.n_ctx == 32768
    room_for(pair, monkeypatch, replace(CONFIG, n_ctx=20480), 0)
    with open_decoder(pair, config) as decoder:
        assert decoder.n_ctx == 20480
    monkeypatch.setattr("dflash_gguf.memory.plan.free_bytes", lambda _: 1000)
    with pytest.raises(Error, match=r"CPU has .* bytes short"):
        open_decoder(pair, config)


def test_a_context_beyond_training_is_warned_of(pair: Pair) -> None:
    sentence = "n_ctx is 600, the model was trained for 512 tokens"
    with pytest.warns(UserWarning, match=sentence) as caught:
        open_decoder(pair, replace(CONFIG, n_ctx=600)).close()
    assert [x.filename for x in caught] == [__file__]


def test_a_drafter_of_another_variant_is_warned_of(pair: Pair, tmp_path: Path) -> None:
    key, eos = "general.name", "tokenizer.ggml.eos_token_id"
    base = edited(pair.drafter, tmp_path / "base.gguf", lambda parts: parts.set(key, "X Base"))
    model = edited(pair.target, tmp_path / "it.gguf", lambda parts: parts.set(key, "X it"))
    with pytest.warns(UserWarning, match="variant base .general.name is .X Base") as seen:
        open_decoder(replace(pair, target=model, drafter=base), CONFIG).close()
    assert [x.filename for x in seen] == [__file__]
    other = edited(pair.drafter, tmp_path / "other.gguf", lambda parts: parts.set(eos, 3))
    open_decoder(replace(pair, drafter=other), CONFIG).close()  # the end token alone says nothing


def test_the_table_and_the_json_say_the_same(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["-m", str(pair.target), "-md", str(pair.drafter), "-c", "256", "--plan"]
    assert main([*command, "--vram", "1G"]) == 0
    table = capsys.readouterr().out
    assert main([*command, "--vram", "1G", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert f"{plan['needed_bytes'] / (1 << 20):.1f}" in table
    assert {item["name"] for item in plan["items"]} <= {
        line.rsplit("  ", 1)[0].strip() for line in table.splitlines()
    }
    assert main([*command, "--vram", "2M"]) == 1
    assert "does not fit" in capsys.readouterr().out


def test_a_plan_of_auto_has_the_rows_that_fit(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_gguf.memory.plan.CONTEXT_BYTES", 0)
    command = ["-m", str(pair.target), "-md", str(pair.drafter), "--plan", "--json"]

    def planned(*flags: str) -> dict[str, Any]:
        main([*command, *flags])
        return dict(json.loads(capsys.readouterr().out))

    large = planned("--vram", "4G")
    assert (large["verify_rows"], large["n_ctx"]) == (64, 512)
    small = planned("--vram", f"{int(large['needed_bytes'] * 0.999)}B")
    assert (small["verify_rows"] < 64, small["missing_bytes"]) == (True, 0)
    forced = planned("--vram", f"{small['free_bytes']}B", "--draft", "tree", "--tree-budget", "63")
    assert forced["missing_bytes"] > 0


def test_fit_leaves_a_gpu_that_is_too_small(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", str(pair.target), "-md", str(pair.drafter), "--plan", "--fit", "--json"]
    assert main([*command, "--vram", "1M"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device"] == "CPU"
    assert "a hypothetical CUDA GPU has 0.00 GiB, so all stays on the CPU" in err
    assert main([*command, "--vram", "1M", "-ngl", "all"]) == 0
    capsys.readouterr()
    assert main([*command, "--vram", "1G"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["device"] == "a hypothetical CUDA GPU"


def test_fit_puts_a_part_on_a_gpu_too_small_for_the_whole(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_gguf.memory.plan.CONTEXT_BYTES", 0)
    settings = ["-c", "256", "-ub", "16", "--draft-window", "32", "--draft", "none"]
    command = ["-m", str(pair.target), "-md", str(pair.drafter), *settings, "--plan", "--json"]
    assert main([*command, "-ctk", "q8_0", "-ctv", "q8_0", "--vram", "1G"]) == 0
    whole = json.loads(capsys.readouterr().out)
    # The memory of CUDA libraries does not depend on the model; 2 % of the GPU stays free.
    library = sum(x["bytes"] for x in whole["items"] if x["name"].startswith("CUDA pool"))
    vram = int((library + (whole["needed_bytes"] - library) * 0.88) / 0.98)
    assert main([*command, "--fit", "--vram", f"{vram}B"]) == 0
    out, err = capsys.readouterr()
    part = json.loads(out)
    assert part["device"] == "a hypothetical CUDA GPU"
    assert "the rest stays on the CPU" in err
    place = {(x["name"], x["where"]) for x in part["items"]}
    assert ("target weights", "device") in place
    assert {("target weights", "host"), ("target weights", "file")} & place
    assert part["needed_bytes"] < whole["needed_bytes"]


def test_fit_chooses_what_a_run_takes(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["-m", str(pair.target), "-md", str(pair.drafter), "--tokens", "1,2,3", "-n", "4"]
    command += ["-t", "1", "-ngl", "0", "--draft", "chain", "--json"]
    assert main([*command, "-c", "256"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*command, "-c", "256", "--fit"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == plain["tokens"]
    assert "--fit on CPU: context 256, K/V f16/f16" in err
    with pytest.raises(SystemExit):
        main([*command, "--vram", "1G"])
    assert "--vram needs --fit or --plan" in capsys.readouterr().err
    assert main([*command, "--vram", "1G", "--fit", "-ngl", "all"]) == 1
    assert "there is none" in capsys.readouterr().err
