"""All uses of private names of torch, Lightning and Hydra, each with a canary test that fails when it changes."""
