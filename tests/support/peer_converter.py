"""Runs llama.cpp's convert_hf_to_gguf.py for several folders: SOURCES JOBS_JSON (see peer.py)."""

from __future__ import annotations

import json
import sys


def main() -> None:
    sources, jobs = sys.argv[1], json.loads(sys.argv[2])
    sys.path.insert(0, sources)
    import convert_hf_to_gguf as converter
    from conversion.base import TextModel

    by_hash = TextModel.get_vocab_base_pre
    for job in jobs:
        # llama.cpp knows no hash of a test's tokenizer, so the job names the pre-tokenizer.
        pre = job["pre"]
        TextModel.get_vocab_base_pre = (lambda *_, pre=pre: pre) if pre else by_hash
        sys.argv = ["convert_hf_to_gguf.py", *job["arguments"]]
        converter.main()


if __name__ == "__main__":
    main()
