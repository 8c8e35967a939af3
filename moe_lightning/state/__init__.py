"""State of a run as keyed pieces of tensors."""
