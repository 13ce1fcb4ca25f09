"""Plugins that SGLang loads into its own processes: a CPU platform, and hooks that keep the hidden states.

Both stay silent unless the environment variables below ask for them, so an installed hsstore changes no other use of
SGLang on the machine. Leaves to `extractor.engines` and `extractor.serving` how SGLang is started, and what is sent.
"""

from __future__ import annotations

CPU_VARIABLE = "HSSTORE_SGLANG_CPU"
"""`1`: the platform plugin claims the machine, which then runs on the CPU whatever else it has."""

CAPTURE_VARIABLE = "HSSTORE_SGLANG_CAPTURE"
"""`1`: the capture hooks are registered."""

ERRORS_VARIABLE = "HSSTORE_SGLANG_ERRORS"
"""Path of the datagram socket on which the background writers report what failed after a ticket had left."""

SPOOL_VARIABLE = "HSSTORE_SGLANG_SPOOL"
"""Directory (`BYTES:DIRECTORY` to bound it) for rows that clients fetch: makes a `launch_server` serve captures."""
