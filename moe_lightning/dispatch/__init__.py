"""Dispatch of tokens to replicated experts: placement, quotas, transports, gradients of replicas."""
