"""MoE layer: router, experts, losses, keyed randomness."""
