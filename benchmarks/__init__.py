"""Measurements of the project: comparisons, paper tables and hardware models.

`moe-bench NAME` runs them in a source checkout; the installed package does not contain them. Every figure is a ratio
inside one run or a median of several.
"""

BENCHMARKS = {
    "layer": "MoE layer forward and backward against a loop over experts and padded matrices",
    "step": "training step with the strategy on one rank against stock Lightning",
    "compare": "the same model trained and saved by stock Lightning (DDP, FSDP2, DCP) and by this project",
    "checkpoint": "stall of a snapshot and speed of writing against memmove, DCP, torch.save and safetensors",
    "balance-trace": "balance of placements and quotas on a recorded routing trace",
    "finetune": "adapters on experts, in four bits too: memory, tokens a second, beside peft's own loop",
    "memory": "predicted and measured peak memory of a rank, for configurations of every kind",
    "packing": "instructions of lengths like Alpaca's, packed against padded",
    "planner": "seconds and memory of plans for thousands of ranks",
    "balance": "step time under skewed routing for every way of balancing, on two ranks of one core each",
    "silent": "public reports of silently wrong gradients and resumes, run against this project, with seeded faults",
    "compatibility": "every feature of a training under every sharding and mesh axis, compared with one process",
    "uneven": "step time with a slow rank, for everything that may follow its speed, on two ranks of one core each",
    "recovery": "a killed rank to the next step, in process, restarted, under torchrun; cost without faults; a trace",
    "members": "rendezvous host with simulated members: first world, steady state, lost nodes, its own restart",
    "paper": "figures and tables of the papers, recomputed",
    "kernels": "every kernel against its reference and its competitors",
    "roofline": "a model of the layer's kernels on GPUs: percent of peak and what bounds each; needs no GPU",
    "tiles": "the table of the matmuls' tiles: by the model, or measured on this machine's GPU for this user",
}
"""Summary of each benchmark by its name; the module of the same name has `Options` and `run`."""
