"""What a person sees of a run: console, curves, samples."""
