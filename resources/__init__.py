"""Resources of the assets: the registry with its results, and the launchers of torchrun jobs."""
