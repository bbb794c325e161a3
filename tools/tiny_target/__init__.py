"""Builds the embedded target model `tiny`: its corpus, its tokenizer and its weights."""
