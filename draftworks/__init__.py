"""Draftworks: makes draft models for speculative decoding and keeps them fresh. A PyTorch library; Dagster drives it from outside."""
