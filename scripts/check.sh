#!/usr/bin/env bash
# Types, lint and all tests; the last line sums every runner: `N passed, N failed`. Non-zero on any failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
python=.venv/bin/python
passed=0 failed=0 skipped=0
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

step() { # name, command...: one check that passes or fails as a whole
  local name=$1
  shift
  printf -- '---- %s\n' "$name"
  if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "FAILED: $name"; fi
}
count() { # file, word: the number before the word in the runner's closing line
  grep -oE "[0-9]+ $2" "$1" | tail -n 1 | grep -oE '[0-9]+' || echo 0
}

wc -l molt/*.ts workers/*.py workers/*.ts | sort -rn | head -n 40
step types npx tsc --noEmit
step lint npx biome check --config-path=scripts/lint.jsonc molt workers scripts test
step python-lint $python -m ruff check --config workers/pyproject.toml workers test scripts
step python-types $python -m pyright --project workers/pyproject.toml

echo '---- vitest'
# Simulated workers start by the hundred: from one file each, without tsx, that takes a third of the time.
if node_modules/.bin/esbuild workers/simulated.ts --bundle --platform=node --format=esm --packages=external \
  --log-level=warning --outfile=.cache/bundles/workers-simulated.ts.mjs; then
  MOLT_BUNDLES=$PWD/.cache/bundles
  export MOLT_BUNDLES
fi
# Two files at a time even on two cores: most of their time they wait for processes to start.
npx vitest run --testTimeout=60000 --maxWorkers="$(node -p 'Math.max(2, os.availableParallelism() - 1)')" --reporter=default --reporter=json --outputFile.json="$work/vitest.json"
vitest_status=$?
if [ -f "$work/vitest.json" ]; then
  read -r p f s < <(node -e 'const r = JSON.parse(require("fs").readFileSync(process.argv[1])); console.log(r.numPassedTests, r.numFailedTests, r.numPendingTests)' "$work/vitest.json")
  passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
  # A file that cannot load, or an error outside a test, fails the run without failing a test.
  if [ "$vitest_status" -ne 0 ] && [ "$f" -eq 0 ]; then failed=$((failed + 1)); fi
else
  failed=$((failed + 1))
fi

echo '---- pytest'
$python -m pytest -c workers/pyproject.toml --rootdir . test -q 2>&1 | tee "$work/pytest.txt"
pytest_status=${PIPESTATUS[0]}
tail -n 3 "$work/pytest.txt" >"$work/pytest.end"
p=$(count "$work/pytest.end" passed) f=$(count "$work/pytest.end" failed) e=$(count "$work/pytest.end" 'errors?') s=$(count "$work/pytest.end" skipped)
passed=$((passed + p)) failed=$((failed + f + e)) skipped=$((skipped + s))
if [ "$pytest_status" -ne 0 ] && [ $((f + e)) -eq 0 ]; then failed=$((failed + 1)); fi
if [ "$p" -eq 0 ]; then failed=$((failed + 1)); echo 'FAILED: pytest ran nothing'; fi

if [ "$skipped" -gt 0 ]; then echo "$passed passed, $failed failed, $skipped skipped"; else echo "$passed passed, $failed failed"; fi
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
