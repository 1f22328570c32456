"""The `tunix` command."""
