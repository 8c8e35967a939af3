"""Partial checkpoints: selection, snapshots in memory, persistence, restore, protection."""
