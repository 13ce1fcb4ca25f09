"""`hsstore verifier`: a verifier in SGLang's own server, for extractions elsewhere."""
