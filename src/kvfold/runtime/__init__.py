"""The only code that touches transformers' caches and a model's forwards."""
