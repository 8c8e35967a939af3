"""Process groups, collectives, and the axes of the mesh: data, sequence, tensor, pipeline."""
