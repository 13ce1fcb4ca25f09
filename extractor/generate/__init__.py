"""`hsstore generate`: the verifier answers the prompts itself, and `hsstore extract` takes what it said.

A drafter learns to guess what its verifier would say, so the verifier's own words are the data to train it on. Leaves
hidden states, loss mask and lengths to the extraction.
"""
