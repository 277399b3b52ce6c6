"""dflash-bench: measures drafting against plain decoding on the user's prompts."""
