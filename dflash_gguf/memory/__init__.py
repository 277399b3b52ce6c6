"""The memory plan of a model, and the search for settings that fit."""
