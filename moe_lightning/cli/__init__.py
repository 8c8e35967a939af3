"""Commands: moe-train, moe-ckpt, moe-generate, moe-eval, moe-data, moe-sim, moe-bench."""
