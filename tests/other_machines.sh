#!/usr/bin/env bash
# Run parity, laws and exports as on other processors, and list what depends on them:
#     tests/other_machines.sh [ARGUMENTS OF PYTEST]
# Each row sets what torch, oneDNN and MKL use of the processor. A row that fails is split into its settings.
set -uo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
tests=("${@:-tests/parity}")
[ $# -gt 0 ] || tests=(tests/parity tests/laws tests/unit/export tests/journeys/test_export.py)
run() { env OMP_NUM_THREADS=1 "$@" > "$log" 2>&1 < /dev/null; }
failures() { sed -nE 's/^(FAILED|ERROR) (.*)/\2/p' "$log" | sed 's/ - .*//'; }
failed=0
while read -r settings; do
  # shellcheck disable=SC2086
  if run $settings .venv/bin/pytest -n 2 --dist worksteal -m 'not long' "${tests[@]}"; then
    echo "$settings: $(tail -n 1 "$log")"
    continue
  fi
  failed=1
  cat "$log"
  mapfile -t names < <(failures)
  for setting in '' $settings; do
    run $setting .venv/bin/pytest "${names[@]}"
    echo "${setting:-as it is}: $(failures | tr '\n' ' ')$(tail -n 1 "$log")"
  done
done << 'ROWS'
ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 TEST_MKLDNN=0 TEST_THREADS=2 OMP_NUM_THREADS=2
ROWS
exit $failed
