"""Hidden states in the formats of other projects: read into a store, written out of one.

Each format is one module that names the code it was read from. `conventions` says what a layer id and the final state
mean there, `importing` and `exporting` do the work for all of them alike, `cli` is `hsstore import` and `export`.
torch and datasets are imported when a file is opened, never before.
"""
