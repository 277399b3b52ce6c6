"""Hugging Face checkpoints to GGUF files that llama.cpp and this project read alike."""
