"""One extraction on many machines: parts for batch systems, actors for Ray. The store needs no coordinator."""
