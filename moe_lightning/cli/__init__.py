"""Commands: moe-train, moe-ckpt, moe-generate, moe-eval, moe-sim, moe-bench."""
