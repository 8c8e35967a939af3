"""Lightning callbacks: load balancing, checkpoints, fault recovery, telemetry, loggers."""
