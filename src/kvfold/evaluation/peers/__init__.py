"""Other projects' ways to a smaller cache, in the same run: asked what every subject is asked.

They live in an environment of their own, whose transformers is the one that they pin. A worker
process there (`worker.py`) loads the same weights and runs the forwards; tokens, greedy choice,
stops and scores stay here and are the same as for kvfold's own subjects.
"""
