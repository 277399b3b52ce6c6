"""Slot files: a saved prompt is restored after a restart of the server."""

from __future__ import annotations

from pathlib import Path

from serving import tiny

PROMPT = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return"
FLAGS = ("-c", "1024", "--cache-ram", "64", "--parallel", "2")


def test_slots_are_saved_restored_and_erased(tmp_path: Path) -> None:
    flags = (*FLAGS, "--slot-save-path", str(tmp_path))
    ask = {"prompt": PROMPT, "n_predict": 12, "ignore_eos": True, "return_tokens": True}
    served = tiny(*flags)
    try:
        assert "the batch is empty" not in served.log
        found = served.post("/slots/0?action=save", {"filename": "a.dfl"})
        assert found.status_code == 400
        assert "slot 0 has answered nothing" in found.text
        first = served.answer("/completion", **ask)
        entry = served.get("/slots").json()[0]
        assert entry["next_token"][0] == {"has_next_token": False, "n_remain": -1, "n_decoded": 0}
        slot = served.answer("/slots/0?action=save", filename="a.dfl")
        n_saved = first["timings"]["prompt_n"] + 11
        assert (slot["id_slot"], slot["filename"], slot["n_saved"]) == (0, "a.dfl", n_saved)
        assert slot["n_written"] == (tmp_path / "a.dfl").stat().st_size
        for name in ("", "../a", "a/b", ".a", "a" * 300, None):
            refused = served.post("/slots/0?action=save", {"filename": name})
            assert refused.status_code == 400
            assert "filename is" in refused.text
        assert served.post("/slots/2?action=save", {"filename": "a"}).status_code == 400
        assert served.post("/slots/0?action=move", {}).status_code == 400
        again = served.answer("/completion", **ask)
        assert again["timings"]["prompt_n"] == 1
        assert served.answer("/slots/0?action=erase")["n_erased"] == n_saved
        there = served.answer("/completion", id_slot=1, **ask)
        assert (there["timings"]["cache_n"], there["id_slot"]) == (0, 1)
        assert served.answer("/slots/1?action=save", filename="b.dfl")["n_saved"] == n_saved
        assert served.answer("/slots/1?action=erase")["n_erased"] == n_saved
        assert served.answer("/completion", **ask)["timings"]["cache_n"] == 0
    finally:
        assert served.close() == 0
    (tmp_path / "cut.dfl").write_bytes((tmp_path / "a.dfl").read_bytes()[:5000])
    served = tiny(*flags)
    try:
        refused = served.post("/slots/1?action=restore", {"filename": "cut.dfl"})
        assert refused.status_code == 400
        assert str(tmp_path) not in refused.text
        slot = served.answer("/slots/1?action=restore", filename="a.dfl")
        assert (slot["n_restored"], slot["n_read"]) == (
            n_saved,
            (tmp_path / "a.dfl").stat().st_size,
        )
        tokens = served.answer("/tokenize", content=PROMPT, add_special=True)["tokens"]
        assert served.answer("/completion", **ask)["timings"]["prompt_n"] == 1
        tokens += first["tokens"]
        found = served.answer("/completion", prompt=tokens, n_predict=12)
        assert (found["timings"]["cache_n"], found["timings"]["prompt_n"]) == (n_saved, 1)
        assert served.answer("/slots/0?action=erase")["n_erased"] >= n_saved
        fresh = served.answer("/completion", prompt=tokens, n_predict=12, cache_prompt=False)
        assert (fresh["timings"]["cache_n"], fresh["content"]) == (0, found["content"])
    finally:
        assert served.close() == 0
    assert sorted(x.name for x in tmp_path.iterdir()) == ["a.dfl", "b.dfl", "cut.dfl"]


def test_slot_files_are_private_and_bounded(tmp_path: Path) -> None:
    folder, stolen = tmp_path / "slots", tmp_path / "stolen"
    folder.mkdir()
    served = tiny(*FLAGS, "--slot-save-path", str(folder), "--slot-save-mib", "1")
    try:
        served.answer("/completion", prompt=PROMPT, n_predict=2)
        # A link under each name that a temporary file may have.
        for thread in Path(f"/proc/{served.engine_pid}/task").iterdir():
            (folder / f".dflash-{served.engine_pid}-{thread.name}.part").symlink_to(stolen)
        served.answer("/slots/0?action=save", filename="a.dfl")
        assert (folder / "a.dfl").stat().st_mode & 0o777 == 0o600
        assert not stolen.exists()
        (folder / "other").write_bytes(bytes(1 << 20))
        refused = served.post("/slots/0?action=save", {"filename": "b.dfl"})
        assert refused.status_code == 507
        assert "--slot-save-mib is 1" in refused.json()["error"]["message"]
        assert not (folder / "b.dfl").exists()
        assert served.answer("/slots/0?action=restore", filename="a.dfl")["n_restored"] > 0
    finally:
        assert served.close() == 0
