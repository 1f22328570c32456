"""Text and token ids: tokenizer, chat templates, stop set, incremental detokenisation."""
