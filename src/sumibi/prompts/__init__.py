"""From a request to routing keys: dialects, chat templates, tokenizers, and the keys with their cache.

Knows what an engine will see of a prompt, and must not know which engine that is: no routing, no HTTP,
no torch. Checked against transformers and engines' own render endpoints, never against our own engine.
"""
