#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run make targets one after the other, all of them even if some fail, and sum up: scripts/setup/stages.sh TARGET...
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit

summary=()
failed=0
for stage in "$@"; do
    printf '\n=== %s ===\n' "$stage"
    began=$SECONDS
    if "${MAKE:-make}" --no-print-directory "$stage"; then
        result=ok
    else
        result=FAILED
        failed=1
    fi
    summary+=("$(printf '%-24s %-7s %5d s' "$stage" "$result" $((SECONDS - began)))")
done

printf '\n=== summary (%d s) ===\n' "$SECONDS"
printf '%s\n' "${summary[@]}"
exit "$failed"
