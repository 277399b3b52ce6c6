"""The parts of train_tiny_target.py and train_drafter.py."""
