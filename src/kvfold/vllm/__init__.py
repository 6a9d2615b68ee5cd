"""kvfold on vLLM: its batching, paged memory and server, with the same add-on folder.

vLLM loads `kvfold.vllm.plugin:register` in each of its processes (entry point
`vllm.general_plugins`). Everything here uses its registries and per-layer seams; no runner or
scheduler is patched, and models that kvfold does not serve stay as they are.
"""
