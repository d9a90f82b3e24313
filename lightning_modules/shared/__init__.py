"""Parts that several workloads share."""
