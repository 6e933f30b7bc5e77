"""The endpoint picker: the router behind Envoy's external processing, for gateways that are not ours.

`stream` is the protocol of one request, without I/O; `visit` and `exchange` are what becomes of it;
`servicer` carries messages; `main` joins and runs it all. Nothing else imports this package, and grpc is
imported only when it runs.
"""
