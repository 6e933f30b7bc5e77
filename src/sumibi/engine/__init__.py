"""The embedded engine: model, paged cache, scheduler, sampler, HTTP server with vLLM's wire.

Heavy imports (torch) live here. Other rooms never import this one: they meet it over HTTP, as they
would meet vLLM.
"""
