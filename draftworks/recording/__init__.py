"""Recording of what servers answer: a pass-through proxy that writes one line a request. Torch-free."""
