"""The service: packed batches of stores over HTTP, streamed from memory maps. `server.app.create_app` builds it."""
