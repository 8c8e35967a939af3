"""Storage of checkpoints: POSIX file systems and object stores."""
