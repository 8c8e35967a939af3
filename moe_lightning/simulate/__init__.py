"""Simulation of runs on clusters that fail."""
