#!/usr/bin/env bash
# Run native tests with the C++ executor built for one of g++'s sanitizers. Not part of CI: the build takes minutes.
#
#   bash tests/native/sanitize.sh address|undefined|thread [arguments of pytest]
#
# Without arguments it runs tests/native and the tests in tests/distributed that use most of the executor on CPUs.
# Needs: Linux; g++ with its libasan, libubsan and libtsan (Debian, Ubuntu: apt-get install g++), or CXX; the project's
# Python environment (PYTHON, by default python); for "thread" setarch (util-linux).
# The libraries are kept in ~/.cache/lightning_zero-sanitize (SANITIZE_CACHE). Torch is not instrumented.
# Exit code: 1 if a test fails or a sanitizer reports a fault, 2 if something is missing. Reports are printed at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "sanitize.sh: $*" >&2; exit 2; }

kind=${1:-}
[[ $kind =~ ^(address|undefined|thread)$ ]] || fail "name a sanitizer: address, undefined or thread."
shift
[[ $(uname -s) == Linux ]] || fail "only Linux has what this needs."
python=${PYTHON:-python} compiler=${CXX:-g++}
"$python" -c "import torch, lightning, pytest, xdist" || fail "$python lacks a package of the project's. Set PYTHON."
command -v "${compiler%% *}" >/dev/null || fail "there is no compiler ${compiler%% *}. Install g++, or set CXX."
declare -A runtimes=([address]=asan [undefined]=ubsan [thread]=tsan)
runtime=$($compiler -print-file-name="lib${runtimes[$kind]}.so")
[[ $runtime == /* ]] || fail "$compiler has no lib${runtimes[$kind]}.so. Install g++ with its sanitizers."
prefix=()
if [[ $kind == thread ]]; then
  command -v setarch >/dev/null || fail "there is no setarch. Install util-linux."
  prefix=(setarch -R) # ThreadSanitizer needs addresses where it expects them
fi

# The compiler adds the flags, in a cache of its own: the name of an entry does not depend on the compiler.
home=${SANITIZE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/lightning_zero-sanitize}/$kind
mkdir -p "$home"
printf '#!/bin/sh\nexec %s "$@" -O1 -g1 -fno-omit-frame-pointer -fsanitize=%s\n' "$compiler" "$kind" >"$home/cxx"
chmod 700 "$home" "$home/cxx"
export CXX=$home/cxx LIGHTNING_ZERO_CACHE=$home/libraries
library=$("$python" -c "from lightning_zero.native.build import build; print(build())")
grep -q "__${runtimes[$kind]}_" "$library" || fail "$library was not built for $kind. Remove it."

reports=$(mktemp -d)
trap 'rm -rf "$reports"' EXIT
options="log_path=$reports/report:print_stacktrace=1"
# leaks: Python leaves memory to the process's end. odr: torch's libraries define variables twice. alloc_dealloc: memory
# that torch allocates by operator new is freed by Python's free, and the other way round.
export ASAN_OPTIONS="$options:detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0"
export UBSAN_OPTIONS="$options"
# Of torch and gloo ThreadSanitizer sees locks, but not the atomics by which they hand memory over.
export TSAN_OPTIONS="$options:ignore_noninstrumented_modules=1:report_signal_unsafe=0:exitcode=0"

if [[ $# -eq 0 ]]; then
  set -- tests/native/test_*.py
  for name in exchange hosts partial_gradients peers ranks_differ turns two_engines watchdog; do
    set -- "$@" "tests/distributed/test_$name.py"
  done
fi
status=0
LD_PRELOAD=$runtime ${prefix[@]+"${prefix[@]}"} "$python" -m pytest -n 0 -p no:cacheprovider -q "$@" || status=1
if compgen -G "$reports/*" >/dev/null; then
  cat "$reports"/*
  echo "sanitize.sh: faults that the $kind sanitizer reported: see above." >&2
  status=1
fi
exit $status
