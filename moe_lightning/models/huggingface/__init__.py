"""Hugging Face models with our MoE layers in them: read from safetensors, trained, written back for plain transformers.

`module` trains, `loading` reads, `export` writes; `families` knows the architectures, `architecture` what becomes of
their blocks, `layouts` and `weights` how tensors lie on disk.
"""
