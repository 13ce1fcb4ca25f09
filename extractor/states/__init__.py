"""Are stored states those that the verifier gives for the stored ids? Checked by numbers, not by names and digests.

`sample` is what is checked, `finding` what is found; `head` and `agreement` ask the verifier's own head, `norm` the
length of rows, `reference` and `layers` transformers' forward, `statistics` the records, `identity` the digests.
`check` puts them together for `verification` (a store) and `first` (the first samples of an extraction).
"""
