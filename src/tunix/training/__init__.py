"""Learner, optimizer, checkpoint, loop, evaluation: what every algorithm shares."""
