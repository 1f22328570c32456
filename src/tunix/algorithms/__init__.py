"""One file an algorithm, each read like its paper."""
