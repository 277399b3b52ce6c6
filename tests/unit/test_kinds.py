"""The table of proposers refuses unknown names."""

from __future__ import annotations

import pytest
from fakes import FakeModel, FakeSequence

from dflash_gguf.config import DecodeConfig
from dflash_gguf.speculative.runtime import SpeculativeRuntime


def test_a_decoder_without_a_drafter_says_so() -> None:
    sequence = FakeSequence(FakeModel(), b"yes", ord(":"), block_size=1)
    with pytest.raises(ValueError, match="draft_type 'dflash' is not available; this decoder has:"):
        SpeculativeRuntime(sequence).controller(DecodeConfig(draft_type="dflash"))
