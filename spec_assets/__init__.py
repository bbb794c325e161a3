"""The asset graph: what exists, per target model, and the checks that hold the line."""
