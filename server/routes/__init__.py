"""The paths of the service, one module per resource. Each has a `router`; `server.app` puts them together."""
