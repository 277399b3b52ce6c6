"""dflash-bench: drafting beside plain decoding, measured on one's own prompts."""
