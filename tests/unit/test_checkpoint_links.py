"""Links in a downloaded folder: followed into the Hugging Face cache, refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from dflash_gguf.convert.checkpoint import read_json
from dflash_gguf.convert.errors import ConvertError


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    private = tmp_path / "private.json"
    private.write_text('{"key": "secret"}')
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to("../private.json")
    (folder / "twice.json").symlink_to("config.json")
    for name in ("config.json", "twice.json"):
        with pytest.raises(ConvertError, match="out of its folder: copy the file") as caught:
            read_json(folder / name)
        assert "secret" not in str(caught.value)


def test_links_in_the_folder_and_into_its_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1234"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "models--c--d" / "blobs"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("1")
    (snapshot / "config.json").symlink_to("../../blobs/file")
    (snapshot / "other.json").symlink_to("file")
    (snapshot / "strange.json").symlink_to("../../../models--c--d/blobs/file")
    (tmp_path / "linked").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "linked"):
        assert read_json(folder / "config.json") == read_json(folder / "other.json") == 1
        with pytest.raises(ConvertError, match="out of its folder"):
            read_json(folder / "strange.json")
