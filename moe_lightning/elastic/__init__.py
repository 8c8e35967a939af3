"""Elastic membership of ranks: rendezvous, launchers, preemption."""
