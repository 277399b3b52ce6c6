"""dflash-run, and command-line parts that other commands share."""

from .command import main

__all__ = ["main"]
