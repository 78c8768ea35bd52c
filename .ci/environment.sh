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

# Runs a command with its output in a file. Prints the title, the file's last line every 4 seconds, and the seconds taken.
# If the command fails, its last lines are printed, and its status is returned.
with_progress() {
  local title=$1 log began=$SECONDS status=0 heartbeat last
  shift
  log=$(mktemp)
  echo "$title ..."
  # `kill -0` ends the loop after Ctrl-C. `sleep` must not keep this script's output open after the script has ended.
  while sleep 4 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    last=$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-100)
    echo "  $((SECONDS - began)) s${last:+: $last}"
  done &
  heartbeat=$!
  "$@" >"$log" 2>&1 || status=$?
  kill "$heartbeat" 2>/dev/null || true
  wait "$heartbeat" 2>/dev/null || true
  if [[ $status == 0 ]]; then
    echo "  done in $((SECONDS - began)) s"
  else
    echo "  failed after $((SECONDS - began)) s; its last lines:"
    tail -n 20 "$log"
  fi
  rm -f "$log"
  return "$status"
}

# Builds the C++ executor, and compiles the modules that all tests import, before many processes would do it at once.
warm_up() {
  python -c 'import lightning.pytorch, torch._inductor.compile_fx; from lightning_zero.native.build import build; build()'
}

activate() {
  PATH=$(cd "${LZ_VENV:-.venv}/bin" && pwd):$PATH
  export PATH
}

# pip compiles no bytecode: most modules are never imported. The first import compiles the others, and stores them unless
# this variable is set.
unset PYTHONDONTWRITEBYTECODE
pip_install() {
  python -m pip install --no-compile --progress-bar off "$@"
}

use_environment() {
  local extras=$1 venv=${LZ_VENV:-.venv} python
  if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python)
    with_progress "Creating the virtual environment $venv" "$python" -m venv "$venv"
  fi
  activate
  # torch comes first and by exact version: some indexes offer a CPU build of one. A torch that is there already (on a GPU
  # machine) stays.
  python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' ||
    install_torch "${LZ_TORCH:-torch==2.13.0}"
  with_progress "Installing lightning_zero and what it imports" pip_install -e ".${extras:+[$extras]}"
}

install_torch() {
  local torch=$1 offered
  # pip takes the build that its index has. On PyPI that is CUDA's, of 3 GB. uv knows where the CPU build is.
  if ! command -v nvidia-smi >/dev/null; then
    offered=$(python -m pip index versions torch 2>/dev/null || true)
    if [[ $offered != *" ${torch#*==}+cpu"* ]] && get_uv; then
      with_progress "Installing $torch without CUDA, by uv (0.2 GB)" env UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 \
        uv pip install --python "$(command -v python)" --torch-backend=cpu "$torch" && return
      echo "uv found no CPU build of $torch: trying pip."
    fi
  fi
  with_progress "Installing $torch (0.2 GB if pip's index has a CPU build, else 3 GB)" pip_install "$torch"
}

get_uv() {
  command -v uv >/dev/null || with_progress "Installing uv, which finds the CPU build of torch" python -m pip install uv
}
