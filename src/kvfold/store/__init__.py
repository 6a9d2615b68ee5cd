"""What is kept on disk: add-ons, the identity of their base model, imports of foreign weights."""
