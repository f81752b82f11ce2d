#!/usr/bin/env bash
# Tests examples/cppo_in_trl.py with TRL, in an environment of its own. Takes about three minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
. "$work/venv/bin/activate"
pip install --quiet --disable-pip-version-check -r requirements.txt "trl==1.16.0"
pytest -q -n 0 -m "" tests/test_cppo_in_trl.py tests/experiments/test_benchmarks.py -k "trl"
