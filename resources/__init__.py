"""What the assets use: the registry with its results, and the launchers of torchrun jobs."""
