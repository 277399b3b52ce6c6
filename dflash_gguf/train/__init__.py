"""dflash-train: trains a drafter for a target."""
