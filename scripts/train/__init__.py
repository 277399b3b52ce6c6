"""Training: train_drafter.py and train_tiny_target.py, and their parts."""
