"""Tokenizer, chat templates, incremental text, and metadata and vocabularies of GGUF files."""
