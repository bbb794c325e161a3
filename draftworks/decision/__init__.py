"""Whether the draft in service is kept, tuned or trained anew: the figures, the rule, its record. Torch-free."""
