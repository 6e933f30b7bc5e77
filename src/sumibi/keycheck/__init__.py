"""`sumibi keys check`: does the gateway read prompts as a running engine does?

Sends generated conversations to an engine, reads them as the gateway would, compares the tokens, and says
what a difference likely comes from. Knows prompts and how to ask; must not know the gateway.
"""
