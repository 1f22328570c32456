"""Prompts, chats and tasks: reading, indexing, packing."""
