#!/usr/bin/env bash
# Run parity and the quick unit tests with the oldest or the newest versions that pyproject.toml allows of everything but torch:
#     tests/versions.sh oldest|newest FOLDER [ARGUMENTS OF PYTEST]
# FOLDER becomes a virtual environment, with the list of its versions in FOLDER/versions.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
case $1 in oldest) resolution=lowest-direct warnings=(-W ignore::DeprecationWarning) ;; newest) resolution=highest warnings=() ;; *) sed -n 2,4p "$0"; exit 2 ;; esac
folder=$2
shift 2
"${PYTHON:-python3}" -m venv --clear "$folder"
pip() { "$folder/bin/pip" install -q --no-compile --disable-pip-version-check "$@"; }
grep '^torch==' constraints.txt > "$folder/torch.txt"
pip uv
"$folder/bin/uv" pip compile -q pyproject.toml --extra dev --resolution $resolution --constraint "$folder/torch.txt" \
  --no-annotate --no-header | grep -vE '^(nvidia|cuda|triton)' > "$folder/versions.txt"
pip --no-deps -r "$folder/versions.txt"
pip --no-deps --no-build-isolation -e .
# An old package may call what a new one deprecates. A test that hangs fails by name.
pytest() { OMP_NUM_THREADS=1 "$folder/bin/pytest" --timeout 120 "${warnings[@]}" "$@"; }
if [ $# -gt 0 ]; then pytest "$@"; exit; fi
failed=0
pytest -n 2 --dist worksteal -m "not slow and not long" --no-shape-checks tests/unit tests/plugins || failed=1
pytest -n 2 --dist worksteal -m "not long" --no-shape-checks tests/parity tests/plugins/*/parity || failed=1
exit $failed
