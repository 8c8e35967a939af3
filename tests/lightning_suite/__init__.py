"""Lightning's own tests, run with our strategy in the place of stock ones; see `run`."""

OPTIONS = "MOE_LIGHTNING_SUITE"
"""Environment variable with the plug-in's options as JSON: folder, rank, ranks, strategy ("stock" or "ours"), tests."""
