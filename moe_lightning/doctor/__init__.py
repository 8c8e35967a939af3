"""Comparison of a distributed run with one process."""
