"""Placement of experts by measured loads: allocation, packing, migration, shadow experts; planning only."""
