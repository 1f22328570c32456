"""Tokenizers, chat templates, stop sets, incremental detokenisation."""
