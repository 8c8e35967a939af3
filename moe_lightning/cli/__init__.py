"""Commands: moe-train, moe-ckpt, moe-sim, moe-bench."""
