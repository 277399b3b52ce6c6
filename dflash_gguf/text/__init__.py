"""Text to tokens and back: tokenizer, chat templates, streaming, vocabularies of GGUF files."""
