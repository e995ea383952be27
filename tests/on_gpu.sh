#!/usr/bin/env bash
# The tests that want a GPU, one process for each file, several at a time:
#   [PYTHON=python3] [JOBS=6] [LIMIT=200] bash tests/on_gpu.sh [FILE...]
# A file that takes longer than LIMIT seconds is interrupted and shows what failed until then. Exit code 1 if anything did.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-200} LOGS OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
LOGS=$(mktemp -d)

one() {
    local log=$LOGS/${1//\//_} start=$SECONDS code
    # In the background a shell ignores interrupts, and so would the tests.
    timeout --foreground -s INT "$LIMIT" env --default-signal=INT "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "$1" > "$log" 2>&1
    code=$?
    [ "$code" -eq 5 ] && return 0 # no test of this file wants a GPU
    echo "$([ "$code" -eq 0 ] && echo ok || echo FAILED) $1: $(tail -n 1 "$log"), $((SECONDS - start)) s"
    [ "$code" -eq 0 ] || grep -E "^E  |^FAILED|^ERROR|Interrupted" "$log" | head -n "${SHOW:-40}"
    return "$code"
}
export -f one

if [ $# -eq 0 ]; then
    mapfile -t files < <({ grep -rl "mark.gpu" tests --include="test_*.py"; ls tests/ops/test_*.py; } | sort -u) # ops: by fixture
    set -- "${files[@]}"
fi
printf '%s\n' "$@" | xargs -P "${JOBS:-6}" -I{} bash -c 'one {}' || { echo "logs in $LOGS" >&2; exit 1; }
