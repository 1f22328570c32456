"""Verifiable rewards: plain functions of a task and its episode."""
