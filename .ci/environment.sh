# Sourced by .ci/run and examples/quickstart.sh, from the repository root. Defines `use_environment EXTRAS`, which makes
# sure that lightning_zero is installed, editable, in $LZ_VENV (default .venv) and puts that environment first in PATH.
# LZ_TORCH names another torch than the usual one, as pip's requirement.

find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "No Python 3.11, 3.12, 3.13 or 3.14 found. Install one, or set LZ_VENV to a virtual environment that has one." >&2
  return 1
}

use_environment() {
  local extras=$1 venv=${LZ_VENV:-.venv} quiet=--quiet python
  if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    "$python" -m venv "$venv"
  fi
  PATH=$(cd "$venv/bin" && pwd):$PATH
  export PATH
  # torch comes first and by exact version: some indexes offer a CPU build of one. A torch that is there already (on a GPU
  # machine) stays.
  python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    install_torch "${LZ_TORCH:-torch==2.13.0}"
  [[ ! -t 1 ]] || quiet=
  python -m pip install $quiet -e ".${extras:+[$extras]}"
}

install_torch() {
  local torch=$1
  # Without a GPU, uv fetches the build without CUDA. pip takes what its index offers first.
  if command -v uv >/dev/null && ! command -v nvidia-smi >/dev/null; then
    echo "Installing $torch without CUDA (downloads 0.2 GB)."
    uv pip install --python "$(command -v python)" --torch-backend=cpu "$torch" && return
    echo "uv could not; pip is next."
  fi
  echo "Installing $torch (downloads 0.2 GB where the index has a build without CUDA, else about 3 GB)."
  python -m pip install "$torch"
}
