"""What a model can be asked to do, one file per task; `task.py` says what all have in common."""
