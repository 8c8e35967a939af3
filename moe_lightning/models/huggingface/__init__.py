"""Hugging Face models with our MoE layers: read from safetensors, trained, exported for plain transformers.

`module` trains, `loading` reads, `export` writes; `architecture` describes the supported architectures and their
blocks, `weights` the tensors on disk, `attention` attention over sharded sequences.
"""
