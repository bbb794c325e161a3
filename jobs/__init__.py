"""Jobs: what can be run, for one partition (target model) at a time."""
