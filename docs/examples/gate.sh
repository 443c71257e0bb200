#!/usr/bin/env bash
# gate.sh [REVISION]: correctness, then this tree against the merge base with REVISION.
set -euo pipefail
python=${PYTHON:-python}
mkdir -p build
"$python" -m pytest correctness_tests --device cuda -n auto --junitxml=build/correctness.xml
base=$(git merge-base "${1:-origin/main}" HEAD)
gate=0 report=0
timeout 3h "$python" -m tinyllama gate --device cuda --against "$base" \
    --gate-json build/gate.json | tee build/gate.txt &&
    "$python" -m tinyllama gate --verify build/gate.json --against "$base" --device cuda || gate=$?
"$python" -m tinyllama report --all --html build/report.html > build/report.txt || report=$?
exit $((gate ? gate : report))
