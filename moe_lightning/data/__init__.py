"""Data modules and loaders whose samples do not depend on the number of ranks."""
