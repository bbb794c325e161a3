"""What a draft will cost in tokens, bytes, hours and money, before it is made. Torch-free."""
