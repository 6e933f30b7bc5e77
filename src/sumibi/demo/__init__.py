"""The demonstration: what a warm cache is worth, shown on real engines with a fixed script.

`script` says what is sent (pure: texts and steps from a seed), `client` sends one request and times its
first token, `play` runs the script against a stack, `claims` judges the measurements, `report` shows
them. Nothing here knows how the router decides: endpoints are read back through the admin door.
"""
