#!/usr/bin/env bash
# One would guess: with Inductor's caches warm, a process that compiles for the CPU starts no interpreter to learn which
# vector instructions the machine has: compiled code and the answer are on disk.
# It is so: before torch 2.14 pick_vec_isa() runs, in each process, for each instruction set that it considers, Python
# processes that import torch and load a library; only the libraries themselves are cached. torch 2.14 caches the answers.
# It matters: a start with all caches warm costs that many imports of torch (24 CPU seconds of 33 for a small GPT-2 with
# the CUDA build of torch 2.11), and a profile of one process shows it as waiting for children. It looks like a cache
# that does not hit. Only code for the CPU is concerned.
# Seen: torch 2.13.0: 10 Python processes in the first and in the second process; torch 2.14.1: 10, then 0. On a machine
# with AVX-512; fewer sets are considered elsewhere.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
cat > "$work/probe.py" <<'PY'
import subprocess
import sys

started = []
plain = subprocess.Popen.__init__


def noting(self, arguments, *rest, **keywords):
    started.append(arguments)
    return plain(self, arguments, *rest, **keywords)


subprocess.Popen.__init__ = noting

import torch
from torch._inductor.cpu_vec_isa import pick_vec_isa

isa = pick_vec_isa()
probes = sum(isinstance(a, (list, tuple)) and a[0] == sys.executable for a in started)
print("torch", torch.__version__, isa, "Python processes started:", probes)
expected = sys.argv[1]
assert isa, "no vector instructions here: nothing to see"
assert (probes > 0) == (expected == "probes"), probes
PY
for case in "2.13.0 probes" "2.14.1 cached"; do
  read -r version second <<< "$case"
  "$work/venv/bin/pip" install --quiet "torch==$version" numpy setuptools
  export TORCHINDUCTOR_CACHE_DIR="$work/cache-$version"
  "$work/venv/bin/python" "$work/probe.py" probes
  "$work/venv/bin/python" "$work/probe.py" "$second"
done
