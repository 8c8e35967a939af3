"""Models: GPT, SwinV2-MoE, Hugging Face architectures; upcycling; optimizers for stacked experts."""
