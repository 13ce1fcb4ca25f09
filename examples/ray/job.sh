#!/usr/bin/env bash
# Submit an extraction to a Ray cluster; it goes on when this terminal is closed.
#
#   RAY_API_SERVER_ADDRESS=http://HEAD:8265 MODEL=… PROMPTS=… OUT=… examples/ray/job.sh --engine-option tp=8
#
# Arguments are passed on to `hsstore extract`. The same line again goes on where it was.
set -euo pipefail

: "${MODEL:?set MODEL to the directory of the verifier}"
: "${PROMPTS:?set PROMPTS to the JSON lines}"
: "${OUT:?set OUT to the store, on a file system that every node sees}"

exec ray job submit --no-wait -- \
    hsstore extract --model "$MODEL" --prompts "$PROMPTS" --out "$OUT" --resume --ray auto "$@"
