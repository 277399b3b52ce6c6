"""Converts Hugging Face checkpoints to GGUF files for llama.cpp and this project."""
