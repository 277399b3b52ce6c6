"""dflash-serve: an HTTP process, and one engine process for each loaded model."""
