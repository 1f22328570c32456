"""What an episode acts in: the protocol and the built-in tasks."""
