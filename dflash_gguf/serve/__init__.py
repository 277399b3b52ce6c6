"""dflash-serve: an HTTP process, and a process of its own for every resident model."""
