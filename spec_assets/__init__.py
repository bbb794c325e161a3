"""The asset graph: assets partitioned by target model, and their checks."""
