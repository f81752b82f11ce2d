#!/usr/bin/env bash
# Tests CPPO in another trainer, in an environment of its own, in a few minutes:
#     bash examples/test_in.sh trl
#     bash examples/test_in.sh verl
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
. "$work/venv/bin/activate"
case "${1:-}" in
    trl)
        pip install --quiet --disable-pip-version-check -r requirements.txt "trl==1.16.0"
        pytest -q -m "" tests/test_cppo_in_trl.py tests/test_family_in_trl.py tests/experiments/test_benchmarks.py -k trl ;;
    verl) # needs an older transformers than this project; the packages after TransferQueue are those that verl forgets to name
        pip install --quiet --disable-pip-version-check "torch==2.13.0" "verl==0.9.1" "TransferQueue==0.1.11" cachetools uvicorn fastapi aiohttp \
            math-verify matplotlib pytest
        pytest -q tests/test_cppo_in_verl.py ;;
    *)
        echo "which trainer? bash examples/test_in.sh trl, or verl" >&2
        exit 2 ;;
esac
