"""What a model takes of memory, and the settings that fit."""
