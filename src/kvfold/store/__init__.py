"""What is kept on disk: add-ons, the identity of their base model, foreign weights, caches."""
